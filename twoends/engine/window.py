"""The panel window: trunk panels read ahead into a ring of bytes, in the order of use, pass after pass.

    used [tail .. head) of the ring, panels in flight or in use, oldest first
    a panel is contiguous: where the end of the ring is too short, it is skipped

Several panels may be in use at once: all that had arrived when they were asked for. Some panels may
be pinned: they have a place of their own, are read in the first pass and stay.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import numpy as np

from twoends.engine.arena import POISON, Arena
from twoends.engine.layout import Entry, Panel, VectorsEntry, pass_bytes
from twoends.engine.reader import Read, Reader
from twoends.kernels.ops import Bytes
from twoends.model.weights import VECTORS

# Matrices that look-ahead needs before their turn.
GUESSING = ("router",)
# Pinned panels take no ring space, so their read-ahead is bounded by count; what streams, by the ring.
_MAX_FLIGHTS = 64
_RUN_BYTES = 4 * 2**20


@dataclass(slots=True)
class _Flight:
    """One panel on its way; `room` is what it takes of the ring (0 when pinned)."""

    entry_id: int
    k: int
    panel: Panel
    buffer: Bytes
    reads: list[Read]
    start: int
    room: int


class Window:
    """Gives panels to one consumer that asks for them in the order of `entries`, again and again."""

    def __init__(
        self,
        entries: tuple[Entry, ...],
        reader: Reader,
        *,
        ring_bytes: int,
        pinned_bytes: int,
        poison: bool,
        pin_first: tuple[str, ...] = (),
    ) -> None:
        """Up to `pinned_bytes` of panels get a place of their own: see `choose_pins`.

        `poison` overwrites released ring bytes, so that a stale read can't look right (tests).
        """
        self._entries, self._reader, self._poison = entries, reader, poison
        self._ring = Arena(ring_bytes)
        self._pin_at, total = choose_pins(entries, pinned_bytes, first=pin_first)
        self._pins = Arena(total)
        # Pinned panels whose read was started, and those that have been taken once and stay.
        self._asked: set[tuple[int, int]] = set()
        self._loaded: set[tuple[int, int]] = set()
        self._num_panels = sum(entry.num_panels for entry in entries)
        self._flights: deque[_Flight] = deque()
        # Those in flight or in use that have a place in the ring.
        self._used: deque[_Flight] = deque()
        self._next = (0, 0)
        self._passes_left = 0
        self._taken: list[_Flight] = []

    @property
    def num_bytes(self) -> int:
        """Bytes that the ring and the pinned panels hold."""
        return self._ring.num_bytes + self._pins.num_bytes

    def allow_passes(self, count: int) -> None:
        """Lets read-ahead run through `count` more whole passes, and no further."""
        if len(self._asked) == self._num_panels:
            return
        self._passes_left += count
        self._read_ahead()

    def take(self, entry_id: int, k: int) -> tuple[Panel, Bytes]:
        """Panel k of an entry and its buffer, valid until `release`. Waits for its bytes."""
        if self.is_pinned(entry_id, k):
            panel = self._entries[entry_id].panel(k)
            pin = self._pin_at[entry_id][k]
            return panel, self._pins.bytes_[pin : pin + panel.room]
        if not self._flights and not self._passes_left:
            self._passes_left = 1
        self._read_ahead()
        assert self._flights, "the ring is smaller than a panel"
        flight = self._flights.popleft()
        assert (flight.entry_id, flight.k) == (entry_id, k), "panels must be asked for in the order of use"
        self._taken.append(flight)
        for read in flight.reads:
            self._reader.wait(read)
        if not flight.room:
            self._loaded.add((entry_id, k))
        return flight.panel, flight.buffer

    def has(self, entry_id: int, k: int) -> bool:
        """Whether `take` would give the panel at once, beside those in use, and leave the disk enough to do.

        What is in use takes at most half of the ring: the other half is being read meanwhile.
        """
        if self.is_pinned(entry_id, k):
            return True
        if not self._flights or any(read.pending for read in self._flights[0].reads):
            return False
        return 2 * sum(flight.room for flight in (*self._taken, self._flights[0])) <= self._ring.num_bytes

    def release(self) -> None:
        """Gives back the panels that `take` gave."""
        for flight in self._taken:
            if not flight.room:
                continue
            assert self._used.popleft() is flight, "what is taken first is the oldest"
            if self._poison:
                flight.buffer.fill(POISON)
        self._taken.clear()
        self._read_ahead()

    def is_pinned(self, entry_id: int, k: int) -> bool:
        """Whether a panel has come to stay."""
        return (entry_id, k) in self._loaded

    def _read_ahead(self) -> None:
        while self._passes_left and len(self._flights) < _MAX_FLIGHTS:
            entry_id, k = self._next
            if not self._pin_or_stream(entry_id, k):
                return
            self._advance()

    def _advance(self) -> None:
        entry_id, k = self._next
        if k + 1 < self._entries[entry_id].num_panels:
            self._next = (entry_id, k + 1)
        elif entry_id + 1 < len(self._entries):
            self._next = (entry_id + 1, 0)
        else:
            self._next = (0, 0)
            # With everything pinned and asked for, no pass has anything left to read.
            self._passes_left = 0 if len(self._asked) == self._num_panels else self._passes_left - 1

    def _pin_or_stream(self, entry_id: int, k: int) -> bool:
        """Starts the read of a panel that isn't here; False when the ring has no room yet."""
        pin = int(self._pin_at[entry_id][k])
        if pin >= 0 and (entry_id, k) in self._asked:
            return True
        panel = self._entries[entry_id].panel(k)
        if pin >= 0:
            buffer, start, room = self._pins.bytes_[pin : pin + panel.room], pin, 0
            self._asked.add((entry_id, k))
        else:
            found = self._find_room(panel.room)
            if found is None:
                return False
            start, room = found, panel.room
            buffer = self._ring.bytes_[start : start + room]
        view = buffer.data
        reads = [
            Read(
                path_id=span.path_id,
                offset=span.offset,
                num_bytes=span.num_bytes,
                buffer=view[span.at :],
                kind="trunk",
                check=span.check,
            )
            for span in panel.ranges
        ]
        for read in reads:
            self._reader.submit(read, demand=False)
        flight = _Flight(entry_id, k, panel, buffer, reads, start, room)
        self._flights.append(flight)
        if room:
            self._used.append(flight)
        return True

    def _find_room(self, room: int) -> int | None:
        size = self._ring.num_bytes
        if not self._used:
            return 0 if room <= size else None
        tail = self._used[0].start
        head = self._used[-1].start + self._used[-1].room
        if head > tail:
            if head + room <= size:
                return head
            return 0 if room <= tail else None
        return head if head + room <= tail else None


def choose_pins(
    entries: tuple[Entry, ...], pinned_bytes: int, *, first: tuple[str, ...] = ()
) -> tuple[list[np.ndarray], int]:
    """Per entry and panel the place in the pinned arena, or -1; and the bytes of that arena.

    They are at most `pinned_bytes`: matrices named in `first`, all of them or none, then others spread
    evenly: every pinned byte saves one byte of reading a pass wherever it lies; spread out, disk and
    arithmetic stay busy side by side. They come in runs, and so does what is read, because a disk is slow
    in small pieces. Small tensors stay decoded where they are pinned, which takes their memory twice: they
    are pinned with all or not.
    """
    total = pass_bytes(entries)
    everything = pinned_bytes >= total
    before = sum(entry.total_room for entry in entries if entry.name in first)
    if before > pinned_bytes:
        first, before = (), 0
    share = min(1.0, (pinned_bytes - before) / max(total - before, 1))
    # So long that both what is pinned of it and what is read of it are runs, if the whole has room for that.
    stretch = min(_RUN_BYTES / max(min(share, 1 - share), _RUN_BYTES / total), total)
    places: list[np.ndarray] = []
    seen = used = used_first = 0
    for entry in entries:
        place = np.full(entry.num_panels, -1, np.int64)
        may_stay = everything or not isinstance(entry, VectorsEntry)
        for k in range(entry.num_panels):
            room = entry.panel(k).room
            if entry.name in first:
                place[k] = used + used_first
                used_first += room
                continue
            seen += room
            due = math.ceil(seen / stretch) * stretch * share
            if may_stay and used + room <= min(pinned_bytes - before, due + 1):
                place[k] = used + used_first
                used += room
        places.append(place)
    return places, used + used_first


def pinned_first(*, small: bool, guessing: bool) -> tuple[str, ...]:
    """What is pinned before anything else: small tensors, and routers that guesses are made with."""
    return (*((VECTORS,) if small else ()), *(GUESSING if guessing else ()))


def small_bytes(entries: tuple[Entry, ...]) -> int:
    """Pinned bytes of all small tensors, as they lie in the files."""
    return sum(entry.total_room for entry in entries if isinstance(entry, VectorsEntry))


def guessing_bytes(entries: tuple[Entry, ...]) -> int:
    """Pinned bytes that look-ahead needs: those of every router."""
    return sum(entry.total_room for entry in entries if entry.name in GUESSING)
