"""Drafts by a smaller model with the same tokenizer, run by the same engine inside the same budget.

Its state goes through every id that is known. From there it guesses one id after the other; when a
guess turns out wrong, it goes back to the copy that was taken before the first of them.
"""

from __future__ import annotations

import numpy as np

from twoends.engine.budget import Plan, make_plan
from twoends.engine.open import Checkpoint, OpenModel
from twoends.errors import OptionError
from twoends.generate.sampler import Sampling, pick
from twoends.generate.tokenizer import Tokenizer
from twoends.kernels.ops import F32, KdaState
from twoends.model.state import MlaState, SequenceState, recurrent_bytes

# The draft model takes at most one of so many parts of the budget, unless its floor is more.
_SHARE = 4
_ANY_BUDGET = 1 << 60


class DraftModel:
    """Implements generate.drafts.Drafter with an open model, which it owns no part of but the state."""

    def __init__(self, model: OpenModel, *, sampling: Sampling) -> None:
        """`sampling` is that of the run: a draw of the same number makes the same choice more likely."""
        assert model.state.position == 0, "the state belongs to the drafts"
        self._model, self._sampling = model, sampling
        self.bytes_per_id = model.plan.bytes_per_token if model.plan.streamed_bytes_per_pass else 0
        self._copy = _StateCopy(model.state)
        self._proposed = 0

    def propose(self, ids: list[int], count: int) -> list[int]:
        """`count` ids, each the one that this model would choose after those before it."""
        logits_W = self._catch_up(ids)
        self._copy.take()
        draft: list[int] = []
        while True:
            draft.append(pick(logits_W, self._sampling, position=len(ids) + len(draft)))
            if len(draft) == count:
                break
            logits_W = self._pass(draft[-1:])
        self._proposed = count
        return draft

    def accept(self, count: int) -> None:
        """Right to the last: the state stands where it should. Else back to what was known for sure."""
        if count < self._proposed:
            self._copy.put_back()

    def _catch_up(self, ids: list[int]) -> F32:
        """Logits after the last of `ids`; those that have not gone through go now, in chunks."""
        state = self._model.state
        assert state.position < len(ids), "the last id has never gone through"
        while True:
            part = ids[state.position : state.position + self._model.plan.chunk_tokens]
            logits_W = self._pass(part)
            if state.position == len(ids):
                return logits_W

    def _pass(self, ids: list[int]) -> F32:
        row_W: F32 = self._model.run_pass(ids, layer_done=lambda done: None)[-1]
        return row_W


class _StateCopy:
    """Room for one copy of the recurrent part; the latent cache only loses rows."""

    def __init__(self, state: SequenceState) -> None:
        self._state = state
        self._position = 0
        self._arrays = [[array.copy() for array in _recurrent(layer)] for layer in state.layers]

    def take(self) -> None:
        self._position = self._state.position
        for layer, copies in zip(self._state.layers, self._arrays, strict=True):
            for array, copy in zip(_recurrent(layer), copies, strict=True):
                copy[...] = array

    def put_back(self) -> None:
        end, self._state.position = self._state.position, self._position
        for layer, copies in zip(self._state.layers, self._arrays, strict=True):
            for array, copy in zip(_recurrent(layer), copies, strict=True):
                array[...] = copy
            if isinstance(layer, MlaState):
                layer.cache_CM[self._position : end] = np.nan


def _recurrent(layer: KdaState | MlaState) -> tuple[F32, ...]:
    if isinstance(layer, MlaState):
        return ()
    return (layer.state_HKV, layer.q_tail_3P, layer.k_tail_3P, layer.v_tail_3P)


def plan_draft_model(draft: Checkpoint, *, ram_bytes: int, context_tokens: int) -> tuple[Plan, int]:
    """The draft model's own plan inside the budget `ram_bytes` of the run, and all that it adds to it.

    It is whole where a quarter of the budget holds it. Raises DoesNotFit where less than its floor
    would be left of the budget.
    """

    def make(own_bytes: int) -> Plan:
        # The program is the run's; its spare part, once more, is for this model's books and threads.
        return make_plan(
            draft.config,
            draft.index,
            ram_bytes=own_bytes,
            program_bytes=0,
            context_tokens=context_tokens,
            chunk_tokens=None,
        )

    whole = make(_ANY_BUDGET)
    own_bytes = max(whole.floor_bytes, min(whole.total_bytes, ram_bytes // _SHARE))
    plan = make(min(own_bytes, ram_bytes))
    return plan, plan.total_bytes + recurrent_bytes(draft.config)


def refuse_other_vocabulary(
    checkpoint: Checkpoint, tokenizer: Tokenizer | None, draft: Checkpoint, draft_tokenizer: Tokenizer | None
) -> None:
    """Raises OptionError unless the draft model's ids mean what this model's do: as many, the same bytes."""
    sizes = (checkpoint.config.vocab_size, draft.config.vocab_size)
    if sizes[0] != sizes[1]:
        raise _refusal(checkpoint, draft, "size of the vocabulary", *(f"{size:,}" for size in sizes))
    if tokenizer is None or draft_tokenizer is None:
        return
    for token_id in range(checkpoint.config.vocab_size):
        our_bytes, their_bytes = tokenizer.token_bytes(token_id), draft_tokenizer.token_bytes(token_id)
        if our_bytes != their_bytes:
            raise _refusal(checkpoint, draft, f"id {token_id:,}", repr(our_bytes), repr(their_bytes))


def _refusal(checkpoint: Checkpoint, draft: Checkpoint, what: str, ours: str, theirs: str) -> OptionError:
    return OptionError(
        f"--draft-model: {draft.directory.name} has another tokenizer than {checkpoint.directory.name}.",
        evidence=[(what, ours, "this model"), (what, theirs, "draft model")],
        remedies=["A draft model must have been trained with this model's tokenizer."],
    )
