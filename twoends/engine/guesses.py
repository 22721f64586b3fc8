"""Rooms for experts that are read on a guess, and what came of each guess."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from twoends.engine.policies import Key
from twoends.engine.reader import Read, Reader
from twoends.engine.recall import Recall
from twoends.engine.trace import Counters, Trace
from twoends.kernels.ops import I32, ExpertWeights


@dataclass(slots=True)
class Content:
    """What a room holds, or is about to."""

    key: Key
    reads: list[Read]
    # None until the bytes of a packed expert are there: they say where its parts are.
    weights: ExpertWeights | None


class _Slab(Protocol):
    """What is asked of engine.experts.ExpertSlots."""

    def holds(self, key: Key) -> bool: ...
    def start_read(self, key: Key, room: int, *, guess: bool = False) -> Content: ...
    def poison_room(self, room: int) -> None: ...


class Guesses:
    """Experts of the layer that comes next, in rooms that no slot has.

    A room that was read into for nothing is free again when its last byte has come.
    """

    def __init__(
        self,
        slab: _Slab,
        reader: Reader,
        recall: Recall,
        *,
        rooms: list[int],
        first_layer: int,
        counters: Counters,
        trace: Trace,
    ) -> None:
        self._slab, self._reader, self._recall = slab, reader, recall
        self._counters, self._trace = counters, trace
        self._first_layer = first_layer
        self._free = rooms
        self._guessed: dict[Key, tuple[int, Content]] = {}
        self._leaving: list[tuple[int, Content]] = []
        # The layer that was guessed for, all its ids, and ranks whose experts no slot held.
        self._layer = -1
        self._ids: list[int] = []
        self._missing: list[int] = []

    def is_worth_asking(self, layer: int) -> bool:
        """Whether to guess for a layer at all."""
        return self._recall.is_worth_asking(layer - self._first_layer)

    def begin(self, layer: int, ids_S: I32) -> None:
        """Reads what is worth it of a guess, best first, while there is room."""
        self._take_back_rooms()
        self._layer, self._ids = layer, ids_S.tolist()
        self._missing = [rank for rank, e in enumerate(self._ids) if not self._slab.holds((layer, e))]
        for rank in self._missing:
            if self._free and self._recall.is_worth_reading(layer - self._first_layer, rank):
                room, key = self._free.pop(), (layer, self._ids[rank])
                self._guessed[key] = (room, self._slab.start_read(key, room, guess=True))
                self._counters.guesses_read += 1
        if self._trace.on:
            read = [expert for _, expert in self._guessed]
            self._trace.event("guess", layer=layer, ids=self._ids, read=read)

    def settle(self, layer: int, ids_TS: I32) -> None:
        """The router has chosen: learns how good the guess was, and gives up what was wrong in it."""
        if layer != self._layer:
            return
        self._layer = -1
        chosen = set(ids_TS.reshape(-1).tolist())
        self._counters.choices_guessed += len(self._ids)
        self._counters.choices_right += sum(expert in chosen for expert in self._ids)
        for rank in self._missing:
            self._recall.learn(layer - self._first_layer, rank, right=self._ids[rank] in chosen)
        for key in [key for key in self._guessed if key[1] not in chosen]:
            self._give_up(*self._guessed.pop(key))

    def take(self, key: Key, *, instead: int) -> tuple[int, Content] | None:
        """The room of a guess that came true, against another; None if there is no such guess."""
        found = self._guessed.pop(key, None)
        if found is None:
            return None
        self._free.append(instead)
        late = [read for read in found[1].reads if read.pending]
        for read in late:
            self._reader.hurry(read)
        self._counters.guesses_late += bool(late)
        self._counters.guesses_useful += not late
        self._tell(key, "late" if late else "useful")
        return found

    def _give_up(self, room: int, content: Content) -> None:
        withdrawn = sum(self._reader.withdraw(read) for read in content.reads)
        wasted = sum(len(read.buffer) for read in content.reads) - withdrawn
        self._counters.guesses_wasted += bool(wasted)
        self._counters.guesses_withdrawn += not wasted
        self._counters.bytes_wasted += wasted
        self._tell(content.key, "wasted" if wasted else "withdrawn")
        self._leaving.append((room, content))
        self._take_back_rooms()

    def _take_back_rooms(self) -> None:
        still = []
        for room, content in self._leaving:
            if any(read.pending for read in content.reads):
                still.append((room, content))
            else:
                self._slab.poison_room(room)
                self._free.append(room)
        self._leaving = still

    def _tell(self, key: Key, outcome: str) -> None:
        if self._trace.on:
            self._trace.event("guessed", layer=key[0], expert=key[1], outcome=outcome)
