"""How many requests find their expert in a slot, by the number of slots: measured, or assumed."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

# Share of hits of the policy `decayed` by slots in token cycles, replayed on 300 tokens of a public
# Kimi-Linear trace (docs/log.md, 2026-11-30, "What a slot is worth").
_ASSUMED = (
    (0.0625, 0.042),
    (0.125, 0.086),
    (0.25, 0.158),
    (0.5, 0.254),
    (0.75, 0.317),
    (1, 0.363),
    (1.5, 0.435),
    (2, 0.487),
    (3, 0.564),
    (4, 0.615),
    (6, 0.688),
    (8, 0.746),
    (12, 0.828),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HitCurve:
    """`points` are (slots, share of requests that hit), from none to every expert; `source` says whence."""

    points: tuple[tuple[int, float], ...]
    source: str

    def as_object(self) -> dict[str, Any]:
        """For JSON; `from_object` reads it."""
        return {"points": [list(point) for point in self.points], "source": self.source}

    @classmethod
    def from_object(cls, found: Any) -> HitCurve:
        """Raises TypeError, KeyError or ValueError for what is no curve."""
        points = tuple((int(slots), float(share)) for slots, share in found["points"])
        in_order = all(a[0] < b[0] and a[1] <= b[1] for a, b in itertools.pairwise(((0, 0.0), *points)))
        if not in_order or any(share > 1 for _, share in points):
            raise ValueError("slots rise, and shares never fall, from 0 to 1")
        return cls(points=points, source=str(found["source"]))

    def share(self, slots: int) -> float:
        """The expected share of hits, linear between the points."""
        below = (0, 0.0)
        for point in self.points:
            if slots <= point[0]:
                part = (slots - below[0]) / (point[0] - below[0]) if point[0] > below[0] else 1.0
                return below[1] + part * (point[1] - below[1])
            below = point
        return below[1]

    def slots_worth(self, least_share: float) -> int:
        """The most slots of which each brings at least `least_share` of all requests, taken in good runs.

        A flat beginning is worth it if what follows makes up for it: the curve's upper hull counts.
        """
        best = 0
        hull = _upper_hull(((0, 0.0), *self.points))
        for (slots, share), (more_slots, more_share) in itertools.pairwise(hull):
            if more_share - share < least_share * (more_slots - slots):
                break
            best = more_slots
        return best


def assumed_curve(*, cycle_slots: int, all_slots: int) -> HitCurve:
    """What a real router gave, scaled to a token cycle of `cycle_slots`; every expert here is every hit."""
    points = [(round(cycles * cycle_slots), share) for cycles, share in _ASSUMED]
    return HitCurve(points=with_ends(points, all_slots), source="assumed: as on a real Kimi-Linear trace")


def with_ends(points: list[tuple[int, float]], all_slots: int) -> tuple[tuple[int, float], ...]:
    """Sorted, never falling, up to the last slot that there can be."""
    kept: list[tuple[int, float]] = []
    highest = 0.0
    for slots, share in sorted(points):
        highest = max(highest, share)
        if 0 < slots < all_slots and (not kept or slots > kept[-1][0]):
            kept.append((slots, highest))
    return (*kept, (all_slots, 1.0)) if all_slots else ()


def _upper_hull(points: tuple[tuple[int, float], ...]) -> list[tuple[int, float]]:
    hull: list[tuple[int, float]] = []
    for x, y in points:
        while len(hull) > 1:
            (x0, y0), (x1, y1) = hull[-2:]
            if (y1 - y0) * (x - x0) > (y - y0) * (x1 - x0):
                break
            hull.pop()
        if not hull or x > hull[-1][0]:
            hull.append((x, y))
    return hull
