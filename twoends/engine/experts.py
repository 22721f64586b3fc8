"""Expert slots: one slab, looked up by (layer, expert), filled on demand, poisoned on release.

    free -> reading -> ready <-> in use        a slot that is reading or in use is busy

A layer's experts are handed out as they become ready: hits first, then reads as they finish.
When a pass needs more experts than there are slots, the rest is read as slots come free.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator

import numpy as np

from twoends.checkpoint.index import CheckpointIndex
from twoends.checkpoint.pack_index import PackedBlock
from twoends.engine.arena import POISON, Arena
from twoends.engine.expert_places import ExpertPlaces, slot_bytes
from twoends.engine.filling import Filling
from twoends.engine.guesses import Content, Guesses
from twoends.engine.packed_experts import PackedExperts
from twoends.engine.policies import Key, Policy
from twoends.engine.reader import Read, Reader, aligned_size
from twoends.engine.recall import Recall
from twoends.engine.trace import Counters, Trace
from twoends.kernels.ops import I32, ExpertWeights, Matrix


class ExpertSlots:
    """All routed experts that are in memory."""

    def __init__(
        self,
        index: CheckpointIndex,
        reader: Reader,
        policy: Policy,
        *,
        num_slots: int,
        counters: Counters,
        trace: Trace,
        poison: bool,
        num_rooms: int = 0,
        recall: Recall | None = None,
        fills: bool = False,
    ) -> None:
        """`num_rooms` beside the slots are for guesses, which `recall` admits.

        With `fills` there is a slot for every expert, and each is read before it is asked for, as the disk
        has time.
        """
        self._index, self._reader, self._policy = index, reader, policy
        self._counters, self._trace, self._poison = counters, trace, poison
        self._packed = PackedExperts.of(index)
        self._stride = slot_bytes(index)
        self._slab = Arena(self._stride * (num_slots + num_rooms))
        self._slots: list[Content | None] = [None] * num_slots
        # A guess that came true gives its room to a slot, and gets that slot's room.
        self._room = list(range(num_slots))
        self.guesses: Guesses | None = None
        if recall is not None:
            rooms = list(range(num_slots, num_slots + num_rooms))
            self.guesses = Guesses(
                self,
                reader,
                recall,
                rooms=rooms,
                first_layer=index.config.num_dense_layers,
                counters=counters,
                trace=trace,
            )
        config = index.config
        assert not fills or num_slots >= len(config.moe_layers) * config.num_experts, "nothing is given up"
        self._filling = Filling(
            itertools.product(config.moe_layers, range(config.num_experts)) if fills else ()
        )
        self._where: dict[Key, int] = {}
        self._busy: set[int] = set()
        # Reads begun since the last `submit`.
        self._begun: list[Read] = []
        self._places = ExpertPlaces(index)
        # What a room's bytes mean depends on where in a page an expert begins: kept, it is mostly the same.
        self._views: list[tuple[tuple[int, ...], ExpertWeights] | None] = [None] * (num_slots + num_rooms)

    @property
    def num_bytes(self) -> int:
        """Bytes of the slab."""
        return self._slab.num_bytes

    def layer(self, layer: int) -> LayerExperts:
        """The experts of one layer for one pass."""
        return LayerExperts(self, layer)

    def holds(self, key: Key) -> bool:
        """Whether an expert is in a slot."""
        return key in self._where

    def begin(self, key: Key) -> tuple[int, bool, bool] | None:
        """(slot, hit, here) with the slot busy, its read begun on a miss; None if every slot is busy.

        What was read on a guess is no hit, and here all the same once its bytes are. What fills a slot is a
        hit if it came in time.
        """
        slot = self._where.get(key)
        if slot is not None:
            self._busy.add(slot)
            self._policy.touch(key, slot)
            here = self._hurry(slot)
            return slot, here, here
        slot = self._policy.place(key, self._busy.__contains__)
        if slot is None:
            return None
        self._evict(slot)
        guessed = self._guessed(key, slot)
        self._slots[slot] = guessed or self.start_read(key, self._room[slot])
        self._where[key] = slot
        self._busy.add(slot)
        return slot, False, guessed is not None and self.is_here(slot)

    def fill(self) -> None:
        """Begins to read experts that nobody has asked for, while every expert has a slot."""
        while not self._filling.is_over and (key := self._filling.next_key()) is not None:
            if key in self._where:
                continue
            slot = self._policy.place(key, self._busy.__contains__)
            assert slot is not None, "every expert has a slot"
            assert self._slots[slot] is None, "nothing is given up for what nobody asked for"
            content = self.start_read(key, self._room[slot], guess=True)
            self._slots[slot] = content
            self._where[key] = slot
            self._filling.begun(content)

    def _hurry(self, slot: int) -> bool:
        """Whether the bytes of a slot are here; what no thread has begun of them is a demand now."""
        content = self._slots[slot]
        assert content is not None
        late = [read for read in content.reads if read.pending]
        for read in late:
            self._reader.hurry(read)
        return not late

    def submit(self) -> None:
        """Hands over the reads that were begun, together."""
        if self._begun:
            self._reader.submit_all(self._begun, demand=True)
            self._begun = []

    def is_here(self, slot: int) -> bool:
        """Whether `ready` would not wait."""
        content = self._slots[slot]
        assert content is not None
        return not any(read.pending for read in content.reads)

    def ready(self, slot: int) -> ExpertWeights:
        """The expert in a slot, after its reads."""
        content = self._slots[slot]
        assert content is not None
        while content.reads:
            read = content.reads[-1]
            self._reader.wait(read)
            if self._packed is not None:
                data = np.frombuffer(read.buffer[read.head : read.needed], np.uint8)
                content.weights = self._packed.weights(data)
            content.reads.pop()
        assert content.weights is not None
        return content.weights

    def release(self, slot: int) -> None:
        """Ends a use; the expert stays until its slot is given up."""
        self._busy.discard(slot)

    def observe(self, layer: int, ids_TS: I32) -> None:
        """Tells the policy what was routed."""
        self.fill()
        self._policy.observe(layer, ids_TS)
        if self.guesses is not None:
            self.guesses.settle(layer, ids_TS)

    def count(self, key: Key, *, hit: bool) -> None:
        """One request; a hit is an expert whose bytes were there before this pass asked."""
        self._counters.expert_requests += 1
        self._counters.expert_hits += hit
        if self._trace.on:
            self._trace.event("hit" if hit else "miss", layer=key[0], expert=key[1])

    def route_event(self, layer: int, ids_TS: I32) -> None:
        """The chosen experts, in rank order, for replay."""
        if self._trace.on:
            self._trace.event("route", layer=layer, ids=ids_TS.tolist())

    def _evict(self, slot: int) -> None:
        old = self._slots[slot]
        if old is None:
            return
        del self._where[old.key]
        if self._trace.on:
            self._trace.event("evict", layer=old.key[0], expert=old.key[1])
        self.poison_room(self._room[slot])

    def poison_room(self, room: int) -> None:
        """Overwrites what a room held, where tests want it so."""
        if self._poison:
            self._slab.bytes_[room * self._stride : (room + 1) * self._stride].fill(POISON)

    def _guessed(self, key: Key, slot: int) -> Content | None:
        """What a guess has read of an expert, or is reading; its room is the slot's from now on."""
        if self.guesses is None:
            return None
        taken = self.guesses.take(key, instead=self._room[slot])
        if taken is None:
            return None
        self._room[slot], content = taken
        return content

    def start_read(self, key: Key, room: int, *, guess: bool = False) -> Content:
        """An expert on its way into a room."""
        base = room * self._stride
        if self._packed is not None:
            content = self._packed_content(self._packed.block(*key), key, base)
        else:
            content = self._plain_content(key, base, room)
        if guess:
            self._reader.submit_all(content.reads, demand=False, guess=True)
        else:
            self._begun += content.reads
        return content

    def _plain_content(self, key: Key, base: int, room: int) -> Content:
        at = base
        reads: list[Read] = []
        starts: list[int] = []
        for path_id, offset, sizes in self._places.runs(key):
            needed = aligned_size(offset, sum(sizes))
            assert at + needed <= base + self._stride, "slot_bytes covers every expert"
            view = self._slab.view(at, needed)
            read = Read(path_id=path_id, offset=offset, num_bytes=sum(sizes), buffer=view, kind="experts")
            reads.append(read)
            begin = at + read.head
            for size in sizes:
                starts.append(begin)
                begin += size
            at += needed
        return Content(key, reads, self._weights(room, tuple(starts)))

    def _packed_content(self, block: PackedBlock, key: Key, base: int) -> Content:
        place = block.place
        read = Read(
            path_id=place.path_id,
            offset=place.offset,
            num_bytes=place.num_bytes,
            buffer=self._slab.view(base, aligned_size(place.offset, place.num_bytes)),
            kind="experts",
            check=block,
        )
        return Content(key, [read], None)

    def _weights(self, room: int, starts: tuple[int, ...]) -> ExpertWeights:
        kept = self._views[room]
        if kept is None or kept[0] != starts:
            kept = self._views[room] = (starts, self._weights_at(starts))
        return kept[1]

    def _weights_at(self, starts: tuple[int, ...]) -> ExpertWeights:
        parts = self._index.expert_parts
        data = [self._slab.bytes_[s : s + part.nbytes] for s, part in zip(starts, parts, strict=True)]
        step = len(parts) // 3
        w1, w2, w3 = (
            Matrix(
                format=self._index.expert_format,
                rows=parts[i].shape[0],
                cols=parts[i].shape[1] * step,
                data=data[i],
                scale=data[i + 1] if step == 2 else None,
            )
            for i in range(0, len(parts), step)
        )
        return ExpertWeights(w1=w1, w2=w2, w3=w3)


class LayerExperts:
    """One layer's requests of one pass; see model/weights.py for the protocol."""

    def __init__(self, slots: ExpertSlots, layer: int) -> None:
        self._slots, self._layer = slots, layer
        self._ready: deque[tuple[int, int]] = deque()
        self._reading: deque[tuple[int, int]] = deque()
        self._queue: deque[int] = deque()

    def request(self, ids_TS: I32) -> None:
        """Marks what is here as in use and starts as many reads as there are slots."""
        self._slots.observe(self._layer, ids_TS)
        self._slots.route_event(self._layer, ids_TS)
        # dict keeps the order of first mention: best-ranked first.
        self._queue.extend(dict.fromkeys(ids_TS.reshape(-1).tolist()))
        self._start()

    def arrivals(self) -> Iterator[list[tuple[int, ExpertWeights]]]:
        """Every requested expert once, in groups of those that are here; their slots are free after it."""
        while self._ready or self._reading or self._queue:
            self._start()
            group = self._next_group()
            try:
                # The last first: by then the others are here, and one wait does for all.
                yield [(expert, self._slots.ready(slot)) for expert, slot in reversed(group)]
            finally:
                for _, slot in group:
                    self._slots.release(slot)

    def _next_group(self) -> list[tuple[int, int]]:
        """Hits first; then the older half of the reads, and what came with it.

        A call for every expert would cost more than it hides, one for all would hide nothing.
        """
        if self._ready:
            group = list(self._ready)
            self._ready.clear()
            return group
        group = [self._reading.popleft() for _ in range((len(self._reading) + 1) // 2)]
        while self._reading and self._slots.is_here(self._reading[0][1]):
            group.append(self._reading.popleft())
        return group

    def _start(self) -> None:
        """Begins queued experts until no slot is left.

        Those that are here go first, all of them: a read must not evict what this pass still needs.
        """
        if not self._queue:
            return
        missing: deque[int] = deque()
        for expert in self._queue:
            if self._slots.holds((self._layer, expert)):
                self._begin(expert)
            else:
                missing.append(expert)
        while missing and self._begin(missing[0]):
            missing.popleft()
        self._queue = missing
        self._slots.submit()

    def _begin(self, expert: int) -> bool:
        key = (self._layer, expert)
        begun = self._slots.begin(key)
        if begun is None:
            return False
        slot, hit, here = begun
        self._slots.count(key, hit=hit)
        (self._ready if here else self._reading).append((expert, slot))
        return True
