"""Cache policies in their plainest form, to hold the real ones against."""

from __future__ import annotations


def lru_hits(passes, num_slots: int) -> list[bool]:
    """Hit or miss of every request under a list that is kept in order of use."""
    order: list = []
    hits = []
    for keys in passes:
        here = [key for key in keys if key in order]
        missing = [key for key in keys if key not in order]
        for key in here:
            order.remove(key)
            order.append(key)
        for key in missing:
            if len(order) == num_slots:
                order.pop(0)
            order.append(key)
        hits += [True] * len(here) + [False] * len(missing)
    return hits


def belady_hits(requests, num_slots: int) -> int:
    """Hits of the policy that knows the future: the content that is needed last gives way."""
    slots: set = set()
    hits = 0
    for now, key in enumerate(requests):
        if key in slots:
            hits += 1
            continue
        if len(slots) == num_slots:
            rest = requests[now + 1 :]
            slots.remove(max(slots, key=lambda k: rest.index(k) if k in rest else len(rest)))
        slots.add(key)
    return hits
