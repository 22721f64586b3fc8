"""Which expert slot is given up for an expert that is on its way.

A policy owns the slots' numbers: it says where an expert may go and forgets what was there. It
changes when bytes move, never which expert is used.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

import numpy as np

from twoends.kernels.ops import F32, I32

Key = tuple[int, int]  # (layer, expert)

# Fixed once for all models and traces (docs/log.md, 2026-11-30, "A score that multiplies").
_FAST_DECAY = np.float32(0.5)
_SLOW_DECAY = np.float32(0.985)
# Keeps an expert that is long popular but not of late apart from one that is neither.
_FAST_FLOOR = np.float32(0.1)
# Scale of the odds of being chosen again; only comparisons between layers see it.
_ODDS = np.float32(0.11)
# What the last token chose is worth more, by its rank: reuse on a real K3 trace falls from 0.68 to
# 0.18 over the ranks of the last token, and no longer depends on the rank one token later.
_FIRST_RANK_GAIN = 7.5
_LAST_RANK_GAIN = 1.5
_CYCLE_WEIGHT = np.float32(2.0)
_TRANSIT_SLOTS = 2


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
    """Keeps the experts with the best chance of being chosen again, whatever layer they belong to.

    Per layer every expert has two counts of its uses, decayed once a token at two speeds, whose
    geometric mean asks for both: lately and often. What the last token chose gains by its gate rank.
    The odds made of this are the expert's value. A new expert takes the place of the lowest value of
    all, if that is lower than its own; a layer whose turn is far off counts less, since its experts
    would hold their slots longer. The others pass through a few transit slots. Choosing costs one
    look per layer, not per slot: each layer knows its lowest.
    """

    name = "decayed"

    def __init__(
        self, num_slots: int, *, first_layer: int, num_layers: int, num_experts: int, ranked: bool = True
    ) -> None:
        """`ranked` False: ids come in no order, and all of a token's gain alike."""
        self._first_layer = first_layer
        self._first_gain = _FIRST_RANK_GAIN if ranked else _LAST_RANK_GAIN
        # np.full touches its pages now; np.zeros would let memory grow later.
        self._fast_LE = np.full((num_layers, num_experts), 0, np.float32)
        self._slow_LE = np.full((num_layers, num_experts), 0, np.float32)
        self._value_LE = np.full((num_layers, num_experts), 0, np.float32)
        self._slot_LE = np.full((num_layers, num_experts), -1, np.int32)
        self._lowest_L = np.full(num_layers, np.inf, np.float32)
        self._loser_L = np.zeros(num_layers, np.int64)
        # Layers whose lowest was looked for while some of their slots were busy.
        self._partly: set[int] = set()
        # Slots of a layer whose turn has just passed wait a whole cycle for it to come again.
        ahead_L = np.arange(num_layers, dtype=np.float32) / max(num_layers, 1)
        self._nearness_L = 1 / (_CYCLE_WEIGHT + ahead_L)
        all_fit = num_slots >= num_layers * num_experts
        self._num_transit = 0 if all_fit else min(num_slots, _TRANSIT_SLOTS)
        self._transit = Lru(self._num_transit)
        self._free = list(range(num_slots - 1, self._num_transit - 1, -1))

    @property
    def popularity_LE(self) -> F32:
        """Slowly decayed uses per expert: what a profile keeps."""
        return self._slow_LE

    def warm(self, popularity_LE: F32) -> None:
        """Begins with the popularity that another run ended with."""
        self._slow_LE[:] = popularity_LE

    def observe(self, layer: int, ids_TS: I32) -> None:
        """Counts of the layer decay once a token; the chosen experts gain."""
        at = layer - self._first_layer
        fast_E, slow_E = self._fast_LE[at], self._slow_LE[at]
        for ids_S in ids_TS:
            fast_E *= _FAST_DECAY
            slow_E *= _SLOW_DECAY
            fast_E[ids_S] += 1
            slow_E[ids_S] += 1
        if not self._num_transit:
            # Every expert has room: nothing is ever given up.
            return
        odds_E = _ODDS * np.sqrt((fast_E + _FAST_FLOOR) * slow_E)
        odds_E[ids_TS[-1]] *= np.geomspace(
            self._first_gain, _LAST_RANK_GAIN, ids_TS.shape[1], dtype=np.float32
        )
        self._value_LE[at] = odds_E / (1 + odds_E)
        self._partly.add(at)
        for seen in self._partly:
            self._find_lowest(seen, _never)
        self._partly.clear()

    def touch(self, key: Key, slot: int) -> None:
        """Keeps the transit slots in order of use; the others go by value."""
        if slot < self._num_transit:
            self._transit.touch(key, slot)

    def place(self, key: Key, is_busy: Callable[[int], bool]) -> int | None:
        """A free slot, else the lowest-valued one if `key` is worth more, else a transit slot."""
        at = key[0] - self._first_layer
        if self._free:
            return self._keep(at, key[1], self._free.pop())
        self._look_again(at, is_busy)
        loser = self._loser(at, key[1])
        # What another layer has lowest may have come into use since it was looked at.
        while loser is not None and is_busy(int(self._slot_LE[loser, self._loser_L[loser]])):
            self._look_again(loser, is_busy)
            loser = self._loser(at, key[1])
        if loser is None:
            return self._transit.place(key, is_busy)
        expert = int(self._loser_L[loser])
        slot = int(self._slot_LE[loser, expert])
        self._slot_LE[loser, expert] = -1
        self._look_again(loser, is_busy)
        return self._keep(at, key[1], slot)

    def _loser(self, at: int, expert: int) -> int | None:
        """The layer whose lowest expert is worth no more than this one; None if there is none."""
        if not self._lowest_L.size:
            return None
        # Layer `at` itself comes last: its turn is now, and again after all the others.
        value_L = self._lowest_L * np.roll(self._nearness_L, at + 1)
        loser = int(value_L.argmin())
        return loser if value_L[loser] <= self._value_LE[at, expert] * self._nearness_L[-1] else None

    def _keep(self, at: int, expert: int, slot: int) -> int:
        self._slot_LE[at, expert] = slot
        self._partly.add(at)
        return slot

    def _look_again(self, at: int, is_busy: Callable[[int], bool]) -> None:
        """The layer's lowest among what is not busy now; `observe` looks again when nothing is."""
        self._find_lowest(at, is_busy)
        self._partly.add(at)

    def _find_lowest(self, at: int, is_busy: Callable[[int], bool]) -> None:
        """The layer's lowest-valued kept expert that is not busy; infinity where it keeps none."""
        slots_E = self._slot_LE[at]
        value_E = np.where(slots_E >= 0, self._value_LE[at], np.float32(np.inf))
        while True:
            expert = int(value_E.argmin())
            if not np.isfinite(value_E[expert]) or not is_busy(int(slots_E[expert])):
                break
            value_E[expert] = np.inf
        self._lowest_L[at], self._loser_L[at] = value_E[expert], expert


def _never(slot: int) -> bool:
    return False


def make_policy(
    name: str,
    num_slots: int,
    *,
    first_layer: int,
    num_layers: int,
    num_experts: int,
    ranked: bool = True,
) -> Policy:
    """The policy of that name: `decayed` or `lru`."""
    if name == "lru":
        return Lru(num_slots)
    assert name == "decayed", name
    return Decayed(
        num_slots,
        first_layer=first_layer,
        num_layers=num_layers,
        num_experts=num_experts,
        ranked=ranked,
    )
