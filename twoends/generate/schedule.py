"""Continuous batching: requests wait in order, sequences share passes, a place that is free is taken at once.

    waiting -> running (prompt in chunks, then one id a pass) -> ended

A pass carries the last id of every sequence that is writing, and as much of the prompts as there are
rows left, the oldest first. Who shares a pass can't change what comes out (docs/contracts.md), so
this file decides only when a request is done.
"""

from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import dataclass

from twoends.engine.forward import LayerDone
from twoends.engine.open import OpenModel
from twoends.generate.generator import Outcome
from twoends.generate.sampler import Sampling, pick
from twoends.generate.stream import Piece, TextStream
from twoends.kernels.ops import F32


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Ids to continue by up to `num_new`. `key` is the caller's; `stream` is the request's own."""

    key: int
    ids: list[int]
    num_new: int
    sampling: Sampling
    stream: TextStream


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """An id that a pass gave to a request, and the text that it made sure; `outcome` with the last one."""

    request: Request
    token_id: int
    piece: Piece
    outcome: Outcome | None


class _Running:
    """A request with a place: its ids, of which the state has seen all but the last `num_unseen`."""

    def __init__(self, request: Request, place: int) -> None:
        self.request, self.place = request, place
        self.num_unseen = len(request.ids)
        self.outcome = Outcome()
        self._ids = list(request.ids)
        self._digest = hashlib.blake2b()

    def take(self, count: int) -> list[int]:
        """The next ids of a pass."""
        begin = len(self._ids) - self.num_unseen
        self.num_unseen -= count
        return self._ids[begin : begin + count]

    def comes_back(self) -> bool:
        """Whether it needs a pass after the one it has just taken ids for, unless a stop ends it."""
        return self.num_unseen > 0 or len(self.outcome.ids) + 1 < self.request.num_new

    def choose(self, logits_W: F32) -> Chosen:
        """The id after the last."""
        outcome, stream = self.outcome, self.request.stream
        data = logits_W.tobytes()
        self._digest.update(data)
        outcome.position_digests.append(hashlib.blake2b(data, digest_size=16).hexdigest())
        token_id = pick(logits_W, self.request.sampling, position=len(self._ids))
        self._ids.append(token_id)
        self.num_unseen = 1
        outcome.ids.append(token_id)
        piece = stream.push(token_id)
        ended = piece.stopped is not None
        if piece.stopped is not None:
            outcome.finish = piece.stopped
        elif len(outcome.ids) == self.request.num_new:
            piece = Piece(text=piece.text + stream.finish().text)
            ended = True
        outcome.text += piece.text
        if ended:
            outcome.logits_digest = self._digest.hexdigest()
        return Chosen(
            request=self.request, token_id=token_id, piece=piece, outcome=outcome if ended else None
        )


class Scheduler:
    """Runs requests on an open model, as many at once as its plan has sequences.

    `num_passes` and `num_rows` count what went through.
    """

    def __init__(self, model: OpenModel) -> None:
        self._model = model
        self._waiting: deque[Request] = deque()
        self._running: list[_Running] = []
        self._free = list(range(model.plan.num_sequences))
        self._promised = 0
        self.num_passes = self.num_rows = 0

    @property
    def num_running(self) -> int:
        """Requests that have a place."""
        return len(self._running)

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self._running and not self._waiting

    @property
    def num_missing(self) -> int:
        """How many more could wait to some use: one for each free place, and the next one after them."""
        return max(len(self._free) + 1 - len(self._waiting), 0)

    def submit(self, request: Request) -> None:
        """Puts a request at the end of the queue. Its ids and new ids must fit the plan's context."""
        assert request.ids, "there must be an id to begin with"
        assert len(request.ids) + request.num_new <= self._model.plan.context_tokens, "the context has room"
        self._waiting.append(request)

    def step(self, layer_done: LayerDone) -> list[Chosen]:
        """One pass, when there is something to do. Gives the ids that it chose, in the order of admission.

        Raises what `OpenModel.run_shared` and `pick` raise; then the model can only be closed.
        """
        self._admit()
        shares = self._share_rows()
        parts = [(running.place, running.take(count)) for running, count in shares]
        self._read_ahead(shares)
        logits_PW = self._model.run_shared(parts, layer_done=layer_done)
        self._promised -= 1
        self.num_passes += 1
        self.num_rows += sum(count for _, count in shares)
        found = []
        for logits_W, (running, _) in zip(logits_PW, shares, strict=True):
            if running.num_unseen:
                continue
            found.append(running.choose(logits_W))
            if found[-1].outcome is not None:
                self._running.remove(running)
                self._free.append(running.place)
        return found

    def _admit(self) -> None:
        """The first requests that wait take the places that are free."""
        self._free.sort()
        while self._free and self._waiting:
            place = self._free.pop(0)
            self._model.states[place].reset()
            self._running.append(_Running(self._waiting.popleft(), place))

    def _share_rows(self) -> list[tuple[_Running, int]]:
        """(sequence, rows) of the next pass: one each to those that need no more, the rest by age."""
        left = self._model.plan.chunk_tokens - sum(running.num_unseen == 1 for running in self._running)
        shares = []
        for running in self._running:
            count = 1
            if running.num_unseen > 1:
                count = min(running.num_unseen, left)
                left -= count
            if count:
                shares.append((running, count))
        return shares

    def _read_ahead(self, shares: list[tuple[_Running, int]]) -> None:
        """Lets the window read into the next pass where one will follow: a stop wastes one window at most."""
        more = bool(self._waiting) or len(shares) < len(self._running)
        wanted = 2 if more or any(running.comes_back() for running, _ in shares) else 1
        if self._promised < wanted:
            self._model.expect_passes(wanted - self._promised)
            self._promised = wanted
