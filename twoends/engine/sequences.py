"""How many sequences share a pass: the number with the fewest bytes per token that the budget has room for.

One more sequence shares every streamed byte of the trunk, wants experts of its own, and takes its
state and cache from what saves reads. Which of these wins is arithmetic on plans. Bytes that are read
from memory are shared as well, and count a little, so that a model that is all there is not run by one.
"""

from __future__ import annotations

from collections.abc import Callable

from twoends.engine.budget import Plan
from twoends.errors import DoesNotFit

_COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64)
MAX_SEQUENCES = _COUNTS[-1]
# How much faster than a disk memory is: 25 GB/s on one core (docs/numbers.md) to 0.8 of a slow disk.
_MEMORY_IS_FASTER = 32


def best_plan(plan_for: Callable[[int], Plan], *, most: int) -> Plan:
    """The best of the plans for 1 to `most` sequences; of equals the one with fewer.

    Raises DoesNotFit if not even one sequence fits.
    """
    counts = [count for count in _COUNTS if count < most] + [min(most, MAX_SEQUENCES)]
    best = plan_for(counts[0])
    for count in counts[1:]:
        try:
            plan = plan_for(count)
        except DoesNotFit:
            break
        if weighed_bytes(plan) < weighed_bytes(best):
            best = plan
    return best


def weighed_bytes(plan: Plan) -> float:
    """Bytes of a token from the disk, and a fraction of all that its share of a pass multiplies."""
    multiplied = (plan.trunk_bytes_per_pass + plan.expert_bytes_per_pass) / plan.num_sequences
    return plan.expected_bytes_per_token + multiplied / _MEMORY_IS_FASTER
