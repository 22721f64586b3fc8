"""How many sequences share a pass, and how many rows: what takes the fewest bytes per row within the budget.

One more sequence shares every streamed byte of the trunk, wants experts of its own, and takes its
state and cache from what saves reads; wider passes take less of the trunk for each row of a prompt, and
room for activations. Which of these wins is arithmetic on plans. Bytes that are read from memory are
shared as well, and count a little, so that a model that is all there is not run by one sequence.
"""

from __future__ import annotations

from collections.abc import Callable

from twoends.engine.budget import Plan
from twoends.errors import DoesNotFit

_COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 32, 40, 48, 64)
MAX_SEQUENCES = _COUNTS[-1]
_CHUNKS = (16, 32, 64, 128, 256, 512)
# How much faster than a disk memory is: 25 GB/s on one core (docs/numbers.md) to 0.8 of a slow disk.
_MEMORY_IS_FASTER = 32


def best_plan(
    plan_for: Callable[[int, int], Plan], *, most: int, rows_each: float, exactly: int | None = None
) -> Plan:
    """The best of `plan_for(sequences, rows of a pass)` for 1 to `most` sequences; of equals the smaller one.

    `rows_each` is how many rows there are for each new token: 1, and more with long prompts; `exactly`
    says how many sequences it must be. Raises DoesNotFit if not even the fewest fit.
    """
    counts = [count for count in _COUNTS if count < most] + [min(most, MAX_SEQUENCES)]
    if exactly is not None:
        counts = [exactly]
    best = plan_for(counts[0], counts[0])
    for count in counts:
        try:
            plans = [plan_for(count, count)]
        except DoesNotFit:
            break
        plans += _wider(plan_for, count, rows_each)
        best = min([best, *plans], key=lambda plan: weighed_bytes(plan, rows_each))
    return best


def rows_of(plan: Plan, rows_each: float) -> float:
    """Rows of a pass in the long run: as many as come, or as have room."""
    return min(plan.num_sequences * rows_each, plan.chunk_tokens)


def expected_bytes(plan: Plan, rows_each: float) -> float:
    """Bytes from the disk for a row, when a slot answers a request as often as its share of all experts.

    A policy does better; this orders plans for different numbers of sequences, no more.
    """
    rows = rows_of(plan, rows_each)
    missing = 1 - plan.num_slots / plan.experts_in_all if plan.experts_in_all else 0.0
    shared = plan.streamed_bytes_per_pass + missing * plan.expert_bytes_of(rows)
    return shared / rows + plan.embedding_bytes_per_token


def weighed_bytes(plan: Plan, rows_each: float) -> float:
    """The same, and a fraction of all that the row's share of a pass multiplies."""
    rows = rows_of(plan, rows_each)
    multiplied = (plan.trunk_bytes_per_pass + plan.expert_bytes_of(rows)) / rows
    return expected_bytes(plan, rows_each) + multiplied / _MEMORY_IS_FASTER


def _wider(plan_for: Callable[[int, int], Plan], count: int, rows_each: float) -> list[Plan]:
    """Plans with more rows than sequences, as long as so many come and fit."""
    plans: list[Plan] = []
    for chunk in _CHUNKS:
        if count < chunk < 2 * count * rows_each:
            try:
                plans.append(plan_for(count, chunk))
            except DoesNotFit:
                break
    return plans
