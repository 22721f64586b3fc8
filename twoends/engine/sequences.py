"""How many sequences share a pass: the number with the fewest bytes per token that the budget has room for.

One more sequence shares every streamed byte of the trunk, wants experts of its own, and takes its
state and cache from what saves reads. Which of these wins is arithmetic on plans.
"""

from __future__ import annotations

from collections.abc import Callable

from twoends.engine.budget import Plan
from twoends.errors import DoesNotFit

_COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64)
MAX_SEQUENCES = _COUNTS[-1]


def best_plan(plan_for: Callable[[int], Plan], *, most: int) -> Plan:
    """The best of the plans for 1 to `most` sequences; of equals the most sequences, which wait least.

    Raises DoesNotFit if not even one sequence fits.
    """
    counts = [count for count in _COUNTS if count < most] + [min(most, MAX_SEQUENCES)]
    best = plan_for(counts[0])
    for count in counts[1:]:
        try:
            plan = plan_for(count)
        except DoesNotFit:
            break
        if plan.expected_bytes_per_token <= best.expected_bytes_per_token:
            best = plan
    return best
