"""Which expert slot is given up for an expert that is on its way.

A policy owns the slots' numbers: it says where an expert may go and forgets what was there. It
changes when bytes move, never which expert is used.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np

from twoends.engine.trial import Trial
from twoends.kernels.ops import F32, I32

Key = tuple[int, int]  # (layer, expert)

# Fixed once for all models and traces (docs/log.md, 2026-11-30, "A score that multiplies").
_FAST_DECAY = np.float32(0.5)
_MEDIUM_DECAY = np.float32(0.8)
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
# Experts that are not worth keeping pass through these. Too few, and reads wait for one another; so of many
# slots a small share, and half of so few that hardly anything is kept long enough.
_LEAST_TRANSIT, _MOST_TRANSIT, _TRANSIT_SHARE, _CHOICES_TO_KEEP = 2, 8, 12, 4
# More than one token needs of them, as a rule; to sort all slots would cost more than to find these.
_FEW_LOSERS = 64


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
    would hold their slots longer. The others pass through a few transit slots. All slots are looked at
    once per layer and pass, in one sweep; each choice then takes the next of the order found.

    Where a router does not choose again what it chose last (a long popular few, topics, texts that
    take turns) those odds mislead. So a trial goes on all the time, and where a plain count decayed
    slowly, or at a medium speed, is right more often, that count is the value.
    """

    name = "decayed"

    def __init__(
        self,
        num_slots: int,
        *,
        first_layer: int,
        num_layers: int,
        num_experts: int,
        choice: int = 0,
        ranked: bool = True,
    ) -> None:
        """`choice` experts are chosen a token and layer (0: not known).

        `ranked` False: ids come in no order, and all of a token's gain alike.
        """
        self._first_layer = first_layer
        self._first_gain = _FIRST_RANK_GAIN if ranked else _LAST_RANK_GAIN
        self._gain_S: F32 = np.ones(0, np.float32)
        # np.full touches its pages now; np.zeros would let memory grow later.
        self._fast_LE = np.full((num_layers, num_experts), 0, np.float32)
        self._medium_LE = np.full((num_layers, num_experts), 0, np.float32)
        self._slow_LE = np.full((num_layers, num_experts), 0, np.float32)
        self._odds_LE = np.full((num_layers, num_experts), 0, np.float32)
        self._value_LE = np.full((num_layers, num_experts), 0, np.float32)
        # Slots of a layer whose turn has just passed wait a whole cycle for it to come again.
        ahead_L = np.arange(num_layers, dtype=np.float32) / max(num_layers, 1)
        self._nearness_L = 1 / (_CYCLE_WEIGHT + ahead_L)
        all_fit = num_slots >= num_layers * num_experts
        self._num_transit = 0 if all_fit else transit_slots(num_slots, choice)
        self._transit = Lru(self._num_transit)
        self._free = list(range(num_slots - 1, self._num_transit - 1, -1))
        # Which expert, layer * num_experts + expert, a kept slot holds; transit slots stay at -1.
        self._owner_S = np.full(num_slots, -1, np.int64)
        # Of the layer whose turn it is: slots to give up, the lowest first, and the one to be looked at next.
        self._turn = -1
        self._losers: Iterator[tuple[float, int]] = iter(())
        self._next_loser: tuple[float, int] | None = None
        self._trial = Trial(3, num_slots=num_slots, num_layers=num_layers, num_experts=num_experts)

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
        fast_E, medium_E, slow_E = self._fast_LE[at], self._medium_LE[at], self._slow_LE[at]
        if self._num_transit:
            self._trial.count(ids_TS[0], self._odds_LE[at], medium_E, slow_E)
        for ids_S in ids_TS:
            for count_E, decay in ((fast_E, _FAST_DECAY), (medium_E, _MEDIUM_DECAY), (slow_E, _SLOW_DECAY)):
                count_E *= decay
                count_E[ids_S] += 1
        if not self._num_transit:
            # Every expert has room: nothing is ever given up.
            return
        odds_E = _ODDS * np.sqrt((fast_E + _FAST_FLOOR) * slow_E)
        odds_E[ids_TS[-1]] *= self._gains(ids_TS.shape[1])
        self._odds_LE[at] = odds_E
        # Each is near the chance of being chosen by the next token, so that layers compare.
        match self._trial.best:
            case 0:
                self._value_LE[at] = odds_E / (1 + odds_E)
            case 1:
                self._value_LE[at] = medium_E * (1 - _MEDIUM_DECAY)
            case _:
                self._value_LE[at] = slow_E * (1 - _SLOW_DECAY)
        self._turn = -1

    def _gains(self, num_ranks: int) -> F32:
        """What each rank of the last token gains."""
        if self._gain_S.size != num_ranks:
            self._gain_S = np.geomspace(self._first_gain, _LAST_RANK_GAIN, num_ranks, dtype=np.float32)
        return self._gain_S

    def touch(self, key: Key, slot: int) -> None:
        """Keeps the transit slots in order of use; the others go by value."""
        if slot < self._num_transit:
            self._transit.touch(key, slot)

    def place(self, key: Key, is_busy: Callable[[int], bool]) -> int | None:
        """A free slot, else the lowest-valued one if `key` is worth more, else a transit slot."""
        at = key[0] - self._first_layer
        slot = self._free.pop() if self._free else self._loser(at, key[1], is_busy)
        if slot is None:
            return self._transit.place(key, is_busy)
        self._owner_S[slot] = at * self._value_LE.shape[1] + key[1]
        return slot

    def _loser(self, at: int, expert: int, is_busy: Callable[[int], bool]) -> int | None:
        """The next slot that is worth no more than this expert and not busy; None if there is none."""
        if self._turn != at:
            self._turn = at
            self._losers = self._in_order(at)
            self._next_loser = next(self._losers, None)
        # Layer `at` itself comes last: its turn is now, and again after all the others.
        worth = float(self._value_LE[at, expert] * self._nearness_L[-1])
        while self._next_loser is not None and self._next_loser[0] <= worth:
            slot = self._next_loser[1]
            self._next_loser = next(self._losers, None)
            if not is_busy(slot):
                return slot
        return None

    def _in_order(self, at: int) -> Iterator[tuple[float, int]]:
        """Value and number of every kept slot, lowest value first, as they are at this layer's turn."""
        owners_K = self._owner_S[self._num_transit :]
        nearness_L = np.roll(self._nearness_L, at + 1)
        value_K = self._value_LE.reshape(-1)[owners_K] * nearness_L[owners_K // self._value_LE.shape[1]]
        few = min(_FEW_LOSERS, value_K.size)
        order_K = np.argpartition(value_K, few - 1) if few < value_K.size else np.arange(few)
        for part in (order_K[:few], order_K[few:]):
            sorted_K = part[np.argsort(value_K[part], kind="stable")]
            yield from zip(value_K[sorted_K].tolist(), (sorted_K + self._num_transit).tolist(), strict=True)


def transit_slots(num_slots: int, choice: int) -> int:
    """How many of the slots keep nothing, where a token chooses `choice` experts a layer."""
    if num_slots <= _CHOICES_TO_KEEP * choice:
        return min(num_slots, max(_LEAST_TRANSIT, num_slots // 2))
    return min(num_slots, max(_LEAST_TRANSIT, min(num_slots // _TRANSIT_SHARE, _MOST_TRANSIT)))


def make_policy(
    name: str,
    num_slots: int,
    *,
    first_layer: int,
    num_layers: int,
    num_experts: int,
    choice: int = 0,
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
        choice=choice,
        ranked=ranked,
    )
