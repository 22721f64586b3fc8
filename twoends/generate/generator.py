"""The loop from prompt to text: prefill in chunks, then one id at a time."""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

from twoends.engine.open import OpenModel
from twoends.generate.drafts import Drafter, Drafts, LookupDrafter, Source, Tally
from twoends.generate.sampler import Sampling, pick
from twoends.generate.stream import Piece, TextStream
from twoends.kernels.ops import F32

Finish = Literal["length", "stop_id", "stop_string", "interrupted"]


class Progress(Protocol):
    """Told what happens, as it happens; draws, or does nothing."""

    def prefill(self, done: int, total: int) -> None:
        """`done` of `total` prompt tokens have gone through."""

    def layer(self, done: int) -> None:
        """`done` layers of this pass are finished."""

    def token(self, token_id: int, piece: Piece) -> None:
        """An id was chosen; `piece` is the text that it made sure."""

    def rest(self, text: str) -> None:
        """No more ids come: the text that was held back."""


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What one run gave. Times in seconds; `token_s` has one entry per token after the first.

    A pass that kept several tokens counts its time in equal parts. `num_drafted` ids were guessed
    and verified, `num_accepted` of them were right; `drafts` says so for each source.
    """

    ids: list[int] = field(default_factory=list)
    text: str = ""
    finish: Finish = "length"
    logits_digest: str = ""
    position_digests: list[str] = field(default_factory=list)
    prefill_s: float = 0.0
    decode_s: float = 0.0
    token_s: list[float] = field(default_factory=list)
    num_drafted: int = 0
    num_accepted: int = 0
    drafts: dict[Source, Tally] = field(default_factory=dict)


class Generator:
    """One sequence on one model: `ids` are all tokens known, the state may lag behind them."""

    def __init__(
        self,
        model: OpenModel,
        ids: list[int],
        *,
        chunk: int,
        earlier_ids: list[int] | None = None,
        draft_model: Drafter | None = None,
    ) -> None:
        """`ids` continue a restored state, or start from nothing.

        Where the plan has room for drafts they come from the text so far and `earlier_ids`, another
        text; where those suggest nothing, from `draft_model`.
        """
        assert len(ids) > model.state.position, "there must be an id that has not gone through"
        self._model = model
        self._chunk = chunk
        self.ids = ids
        self._drafts = _drafts(model, earlier_ids or [], draft_model) if model.plan.draft_tokens else None

    def run(
        self,
        *,
        num_new: int,
        sampling: Sampling,
        stream: TextStream,
        progress: Progress,
        stop_asked: Callable[[], bool],
    ) -> Outcome:
        """Up to `num_new` ids. `stop_asked` is looked at between passes, so the state stays whole."""
        outcome = Outcome()
        digest = hashlib.blake2b()
        waiting = len(self.ids) - self._model.state.position
        # Every weight of every coming pass may be read ahead; a stop wastes at most one window.
        self._model.expect_passes(-(-waiting // self._chunk) + num_new - 1)
        began = time.perf_counter()
        logits_W = self._prefill(progress, stop_asked)
        outcome.prefill_s = time.perf_counter() - began
        choose = functools.partial(
            self._choose, outcome, digest, sampling=sampling, stream=stream, progress=progress
        )
        if logits_W is None:
            outcome.finish = "interrupted"
        else:
            choose(logits_W)
        while outcome.finish == "length" and len(outcome.ids) < num_new:
            if stop_asked():
                outcome.finish = "interrupted"
                break
            step_began = time.perf_counter()
            count = self._step(outcome, choose, progress, left=num_new - len(outcome.ids))
            step_s = time.perf_counter() - step_began
            outcome.token_s += [step_s / count] * count
        outcome.decode_s = sum(outcome.token_s)
        if outcome.finish in ("length", "interrupted"):
            rest = stream.finish().text
            outcome.text += rest
            progress.rest(rest)
        outcome.logits_digest = digest.hexdigest()
        if self._drafts is not None:
            outcome.drafts = self._drafts.tallies
        return outcome

    def _step(self, outcome: Outcome, choose: Callable[[F32], int], progress: Progress, *, left: int) -> int:
        """One pass: the last id, and drafts after it if that saves bytes. Gives the number of new ids."""
        # The last id of a run comes from the row before it, so `left` ids need left - 1 drafts.
        draft = [] if self._drafts is None else self._drafts.propose(self.ids, most=left - 1)
        if not draft:
            choose(self._model.run_pass(self.ids[-1:], layer_done=progress.layer)[0])
            return 1
        logits_TW, tentative = self._model.run_tentative([self.ids[-1], *draft], layer_done=progress.layer)
        count = 0
        for logits_W in logits_TW:
            token_id = choose(logits_W)
            count += 1
            # A row counts only while every id before it was the one that would have been chosen.
            if outcome.finish != "length" or count > len(draft) or token_id != draft[count - 1]:
                break
        tentative.keep(count, self._model.ops)
        accepted = count - 1
        outcome.num_drafted += len(draft)
        outcome.num_accepted += accepted
        assert self._drafts is not None, "a draft comes from somewhere"
        self._drafts.learn(drafted=len(draft), accepted=accepted)
        return count

    def _prefill(self, progress: Progress, stop_asked: Callable[[], bool]) -> F32 | None:
        """Logits after the last known id; None when asked to stop before."""
        state = self._model.state
        total = len(self.ids) - state.position
        done = 0
        while True:
            part = self.ids[state.position : state.position + self._chunk]
            logits_TW = self._model.run_pass(part, layer_done=progress.layer)
            done += len(part)
            progress.prefill(done, total)
            if done == total:
                row_W: F32 = logits_TW[-1]
                return row_W
            if stop_asked():
                return None

    def _choose(
        self,
        outcome: Outcome,
        digest: hashlib.blake2b,
        logits_W: F32,
        *,
        sampling: Sampling,
        stream: TextStream,
        progress: Progress,
    ) -> int:
        data = logits_W.tobytes()
        digest.update(data)
        outcome.position_digests.append(hashlib.blake2b(data, digest_size=16).hexdigest())
        token_id = pick(logits_W, sampling, position=len(self.ids))
        self.ids.append(token_id)
        outcome.ids.append(token_id)
        piece = stream.push(token_id)
        outcome.text += piece.text
        if piece.stopped is not None:
            outcome.finish = piece.stopped
        progress.token(token_id, piece)
        return token_id


def _drafts(model: OpenModel, earlier_ids: list[int], draft_model: Drafter | None) -> Drafts:
    plan = model.plan
    lookup = LookupDrafter(context_tokens=plan.context_tokens, before=earlier_ids)
    sources: dict[Source, Drafter] = {"lookup": lookup}
    if draft_model is not None:
        sources["model"] = draft_model
    return Drafts(
        sources,
        most=plan.draft_tokens,
        streamed_bytes=plan.streamed_bytes_per_pass,
        expert_bytes=plan.expert_bytes_per_token,
    )
