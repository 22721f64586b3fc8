"""Samples of a product of choices in which no value, or no pair of values, is missing."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Sequence

Case = tuple[Hashable, ...]


def every_pair(axes: Sequence[Sequence[Hashable]]) -> list[Case]:
    """Cases, one value of each axis, in which any value of any axis meets any value of every other.

    Each begins with a pair that has not met and takes for the other axes the values by which most new pairs
    meet; of equals the one used least. Where an axis has no value there is no case.
    """
    if not all(axes):
        return []
    left = set(pairs_of(axes))
    uses = [dict.fromkeys(values, 0) for values in axes]
    cases = []
    while left:
        at, value, other, its = min(left, key=lambda pair: _order(pair, axes))
        case: dict[int, Hashable] = {at: value, other: its}
        for axis in sorted(set(range(len(axes))) - {at, other}, key=lambda axis: -len(axes[axis])):
            case[axis] = min(
                axes[axis], key=lambda value: (-_gain(case, axis, value, left), uses[axis][value])
            )
        for axis, chosen in case.items():
            uses[axis][chosen] += 1
        cases.append(tuple(case[axis] for axis in range(len(axes))))
        left -= set(pairs_of([[value] for value in cases[-1]]))
    return cases


def every_value(axes: Sequence[Sequence[Hashable]]) -> list[Case]:
    """As many cases as the longest axis has values; each value of any axis is in one or more."""
    if not all(axes):
        return []
    return [tuple(values[at % len(values)] for values in axes) for at in range(max(map(len, axes)))]


def pairs_of(axes: Sequence[Sequence[Hashable]]) -> Iterator[tuple[int, Hashable, int, Hashable]]:
    """(axis, value, later axis, its value) of all that can meet."""
    for one, other in itertools.combinations(range(len(axes)), 2):
        for value, its in itertools.product(axes[one], axes[other]):
            yield one, value, other, its


def _order(pair: tuple[int, Hashable, int, Hashable], axes: Sequence[Sequence[Hashable]]) -> tuple[int, ...]:
    """The widest axes first, where pairs are most; then as they were given."""
    at, value, other, its = pair
    return -len(axes[at]) * len(axes[other]), at, other, axes[at].index(value), axes[other].index(its)


def _gain(case: dict[int, Hashable], axis: int, value: Hashable, left: set) -> int:
    return sum(
        ((at, its, axis, value) if at < axis else (axis, value, at, its)) in left for at, its in case.items()
    )
