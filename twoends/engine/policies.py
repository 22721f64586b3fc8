"""Which expert slot is given up for an expert that is on its way.

A policy owns the slots' numbers: it says where an expert may go and forgets what was there. It
changes when bytes move, never which expert is used.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

import numpy as np

from twoends.kernels.ops import I32

Key = tuple[int, int]  # (layer, expert)

# Half of a score is gone after three tokens; the best-ranked expert of a token is worth four times
# the last one (reuse by gate rank on a real K3 trace falls from 0.68 to 0.18).
_DECAY = 0.8
_LAST_RANK_WEIGHT = 0.25


class Policy(Protocol):
    """Placement of experts in slots 0 .. num_slots - 1."""

    name: str

    def observe(self, layer: int, ids_TS: I32) -> None:
        """A pass routed T tokens of this layer to these experts, best first."""

    def touch(self, key: Key, slot: int) -> None:
        """The expert in this slot was used."""

    def place(self, key: Key, is_busy: Callable[[int], bool]) -> int | None:
        """A slot for `key` that is not busy, whose old content is given up; None if all are busy."""


class Lru:
    """The slot used longest ago, over all layers."""

    name = "lru"

    def __init__(self, num_slots: int) -> None:
        self._order: OrderedDict[int, None] = OrderedDict((slot, None) for slot in range(num_slots))

    def observe(self, layer: int, ids_TS: I32) -> None:
        """LRU looks at nothing but use."""

    def touch(self, key: Key, slot: int) -> None:
        """Moves the slot to the young end."""
        self._order.move_to_end(slot)

    def place(self, key: Key, is_busy: Callable[[int], bool]) -> int | None:
        """The oldest slot that is not busy; busy ones are few, so this is O(1)."""
        for slot in self._order:
            if not is_busy(slot):
                self._order.move_to_end(slot)
                return slot
        return None


class Decayed:
    """A share of the slots per layer, kept for the experts with the highest decayed, rank-weighted use.

    A few transit slots belong to no layer: an expert that doesn't earn a place in its layer's
    share passes through one of them.
    """

    name = "decayed"

    def __init__(self, num_slots: int, *, first_layer: int, num_layers: int, num_experts: int) -> None:
        self._first_layer = first_layer
        self._scores_LE = np.zeros((num_layers, num_experts), np.float32)
        self._free: list[list[int]] = [[] for _ in range(num_layers)]
        self._kept: list[dict[int, int]] = [{} for _ in range(num_layers)]
        share = np.minimum(_shares(num_slots, num_layers), num_experts)
        transit = max(num_slots - int(share.sum()), 0)
        self._transit = Lru(transit)
        slot = transit
        for layer, count in enumerate(share.tolist()):
            self._free[layer] = list(range(slot, slot + count))
            slot += count
        self._first_owned = transit

    def observe(self, layer: int, ids_TS: I32) -> None:
        """Scores of the layer decay once a token; the chosen experts gain by their rank."""
        scores_E = self._scores_LE[layer - self._first_layer]
        gain_S = np.linspace(1.0, _LAST_RANK_WEIGHT, ids_TS.shape[1], dtype=np.float32)
        for ids_S in ids_TS:
            scores_E *= np.float32(_DECAY)
            scores_E[ids_S] += gain_S

    def touch(self, key: Key, slot: int) -> None:
        """Keeps the transit slots in order of use; owned slots go by score."""
        if slot < self._first_owned:
            self._transit.touch(key, slot)

    def place(self, key: Key, is_busy: Callable[[int], bool]) -> int | None:
        """A free or lower-scored slot of the layer's share, else a transit slot."""
        layer = key[0] - self._first_layer
        kept, scores_E = self._kept[layer], self._scores_LE[layer]
        if self._free[layer]:
            slot = self._free[layer].pop()
            kept[key[1]] = slot
            return slot
        candidates = [expert for expert, slot in kept.items() if not is_busy(slot)]
        if candidates:
            worst = min(candidates, key=lambda expert: (float(scores_E[expert]), expert))
            if scores_E[worst] <= scores_E[key[1]]:
                kept[key[1]] = slot = kept.pop(worst)
                return slot
        slot_in_transit = self._transit.place(key, is_busy)
        if slot_in_transit is None and candidates:
            # No way through: progress matters more than the better score.
            kept[key[1]] = slot_in_transit = kept.pop(worst)
        return slot_in_transit


def _shares(num_slots: int, num_layers: int) -> np.ndarray:
    """Slots per layer; what doesn't divide goes to the later layers, which reuse more."""
    if not num_layers:
        return np.zeros(0, np.int64)
    transit = min(num_slots, 4)
    per_layer, rest = divmod(num_slots - transit, num_layers)
    share = np.full(num_layers, per_layer)
    if rest:
        share[-rest:] += 1
    return share


def make_policy(name: str, num_slots: int, *, first_layer: int, num_layers: int, num_experts: int) -> Policy:
    """The policy of that name: `decayed` or `lru`."""
    if name == "lru":
        return Lru(num_slots)
    assert name == "decayed", name
    return Decayed(num_slots, first_layer=first_layer, num_layers=num_layers, num_experts=num_experts)
