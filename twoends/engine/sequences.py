"""How many sequences share a pass, and how many rows: what takes the fewest bytes per row within the budget.

One more sequence shares every streamed byte of the trunk, wants experts of its own, and takes its
state and cache from what saves reads; wider passes take less of the trunk for each row of a prompt, and
room for activations. Which of these wins is arithmetic on plans. Bytes that are read from memory are
shared as well, and count a little, so that a model that is all there is not run by one sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from twoends.engine.budget import Plan
from twoends.errors import DoesNotFit

_COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 32, 40, 48, 64)
MAX_SEQUENCES = _COUNTS[-1]
_CHUNKS = (2, 4, 8, 16, 32, 64, 128, 256, 512)
# How much faster than a disk memory is: 25 GB/s on one core (docs/numbers.md) to 0.8 of a slow disk.
_MEMORY_IS_FASTER = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What requests want on average: tokens of their prompts, and new ones; at least one of each."""

    prompt_tokens: float
    new_tokens: float

    def rows_of(self, plan: Plan) -> float:
        """Mean rows of a pass when requests never run out.

        A pass has a row for each of N sequences that are writing; the rest of its C are for prompts. A prompt
        of p takes p / (C - N + 1) passes of its sequence, the last of which gives the first new token.
        """
        rows = self.prompt_tokens + self.new_tokens - 1
        free = plan.chunk_tokens - plan.num_sequences + 1
        own = max(self.prompt_tokens / free, 1.0) + self.new_tokens - 1
        return rows / max(rows / plan.chunk_tokens, own / plan.num_sequences)


def best_plan(
    plan_for: Callable[[int, int], Plan], *, most: int, load: Load, exactly: int | None = None
) -> Plan:
    """The best of `plan_for(sequences, rows of a pass)` for 1 to `most` sequences; of equals the smaller one.

    `exactly` says how many sequences it must be. Raises DoesNotFit if not even the fewest fit.
    """
    counts = [count for count in _COUNTS if count < most] + [min(most, MAX_SEQUENCES)]
    if exactly is not None:
        counts = [exactly]
    best = _best_rows(plan_for, counts[0], load)
    for count in counts[1:]:
        try:
            plan = _best_rows(plan_for, count, load)
        except DoesNotFit:
            break
        if weighed_bytes(plan, load) < weighed_bytes(best, load):
            best = plan
    return best


def expected_bytes(plan: Plan, load: Load) -> float:
    """Bytes from the disk for a row, when a slot answers a request as often as its share of all experts.

    A policy does better; this orders plans for different numbers of sequences, no more.
    """
    rows = load.rows_of(plan)
    missing = 1 - plan.num_slots / plan.experts_in_all if plan.experts_in_all else 0.0
    shared = plan.streamed_bytes_per_pass + missing * plan.expert_bytes_of(rows)
    return shared / rows + plan.embedding_bytes_per_token


def weighed_bytes(plan: Plan, load: Load) -> float:
    """The same, and a fraction of all that the row's share of a pass multiplies."""
    rows = load.rows_of(plan)
    multiplied = (plan.trunk_bytes_per_pass + plan.expert_bytes_of(rows)) / rows
    return expected_bytes(plan, load) + multiplied / _MEMORY_IS_FASTER


def _best_rows(plan_for: Callable[[int, int], Plan], count: int, load: Load) -> Plan:
    """The best plan of so many sequences: rows are doubled for as long as that helps and fits."""
    best = plan_for(count, count)
    for chunk in _CHUNKS:
        if chunk <= count:
            continue
        try:
            wider = plan_for(count, chunk)
        except DoesNotFit:
            break
        if weighed_bytes(wider, load) >= weighed_bytes(best, load):
            break
        best = wider
    return best
