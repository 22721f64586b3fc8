"""Expert slots: one slab, looked up by (layer, expert), filled on demand, poisoned on release.

    free -> reading -> ready <-> in use        a slot that is reading or in use is busy

A layer's experts are handed out as they become ready: hits first, then reads as they finish.
When a pass needs more experts than there are slots, the rest is read as slots come free.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from twoends.checkpoint.index import CheckpointIndex
from twoends.engine.arena import PAGE, POISON, Arena, align_up
from twoends.engine.packed_experts import PackedExperts
from twoends.engine.policies import Key, Policy
from twoends.engine.reader import Read, Reader, aligned_size
from twoends.engine.trace import Counters, Trace
from twoends.kernels.ops import I32, ExpertWeights, Matrix


@dataclass(slots=True)
class _Slot:
    """What a slot holds, or is about to."""

    key: Key
    reads: list[Read]
    # None until the bytes of a packed expert are there: they say where its parts are.
    weights: ExpertWeights | None


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
    ) -> None:
        self._index, self._reader, self._policy = index, reader, policy
        self._counters, self._trace, self._poison = counters, trace, poison
        self._packed = PackedExperts.of(index)
        self._stride = slot_bytes(index)
        self._slab = Arena(self._stride * num_slots)
        self._slots: list[_Slot | None] = [None] * num_slots
        self._where: dict[Key, int] = {}
        self._busy: set[int] = set()
        # Reads begun since the last `submit`.
        self._begun: list[Read] = []
        self._places = _Places(index)
        # What a slot's bytes mean depends on where in a page an expert begins: kept, it is mostly the same.
        self._views: list[tuple[tuple[int, ...], ExpertWeights] | None] = [None] * num_slots

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

    def begin(self, key: Key) -> tuple[int, bool] | None:
        """(slot, hit) with the slot busy, its read begun on a miss; None if every slot is busy."""
        slot = self._where.get(key)
        if slot is not None:
            self._busy.add(slot)
            self._policy.touch(key, slot)
            return slot, True
        slot = self._policy.place(key, self._busy.__contains__)
        if slot is None:
            return None
        self._evict(slot)
        self._slots[slot] = self._start_read(key, slot)
        self._where[key] = slot
        self._busy.add(slot)
        return slot, False

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
        self._policy.observe(layer, ids_TS)

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
        if self._poison:
            self._slab.bytes_[slot * self._stride : (slot + 1) * self._stride].fill(POISON)

    def _start_read(self, key: Key, slot: int) -> _Slot:
        base = at = slot * self._stride
        if self._packed is not None:
            return self._start_packed_read(key, base)
        reads: list[Read] = []
        starts: list[int] = []
        for path_id, offset, sizes in self._places.runs(key):
            room = aligned_size(offset, sum(sizes))
            assert at + room <= base + self._stride, "slot_bytes covers every expert"
            view = self._slab.view(at, room)
            read = Read(path_id=path_id, offset=offset, num_bytes=sum(sizes), buffer=view, kind="experts")
            reads.append(read)
            begin = at + read.head
            for size in sizes:
                starts.append(begin)
                begin += size
            at += room
        self._begun += reads
        return _Slot(key, reads, self._weights(slot, tuple(starts)))

    def _start_packed_read(self, key: Key, base: int) -> _Slot:
        assert self._packed is not None
        block = self._packed.block(*key)
        place = block.place
        read = Read(
            path_id=place.path_id,
            offset=place.offset,
            num_bytes=place.num_bytes,
            buffer=self._slab.view(base, aligned_size(place.offset, place.num_bytes)),
            kind="experts",
            check=block,
        )
        self._begun.append(read)
        return _Slot(key, [read], None)

    def _weights(self, slot: int, starts: tuple[int, ...]) -> ExpertWeights:
        kept = self._views[slot]
        if kept is None or kept[0] != starts:
            kept = self._views[slot] = (starts, self._weights_at(starts))
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
        slot, hit = begun
        self._slots.count(key, hit=hit)
        (self._ready if hit else self._reading).append((expert, slot))
        return True


class _Places:
    """Where experts lie: as few contiguous runs as their parts make."""

    def __init__(self, index: CheckpointIndex) -> None:
        self._index = index
        self._first_layer = index.config.num_dense_layers
        offsets_LEP, sizes_P, joined_LEP = _places(index)
        self._sizes = [int(size) for size in sizes_P]
        self._is_one_LE: np.ndarray = np.all(joined_LEP, axis=-1)
        self._offset_LE, self._path_LE = offsets_LEP[..., 0], index.tables.expert_path_LEP[..., 0]

    def runs(self, key: Key) -> list[tuple[int, int, list[int]]]:
        """The parts of an expert as (file, offset, part sizes), joined where they touch."""
        cell = (key[0] - self._first_layer, key[1])
        if self._is_one_LE[cell]:
            return [(int(self._path_LE[cell]), int(self._offset_LE[cell]), self._sizes)]
        runs: list[tuple[int, int, list[int]]] = []
        for segment in self._index.expert(*key):
            if runs and runs[-1][0] == segment.path_id and runs[-1][1] + sum(runs[-1][2]) == segment.offset:
                runs[-1][2].append(segment.nbytes)
            else:
                runs.append((segment.path_id, segment.offset, [segment.nbytes]))
        return runs


def slot_bytes(index: CheckpointIndex) -> int:
    """Room that any expert of this checkpoint needs, alignment included."""
    packed = PackedExperts.of(index)
    if packed is not None:
        return packed.most_bytes
    offsets_LEP, sizes_P, joined_LEP = _places(index)
    if not joined_LEP.all():
        return sum(align_up(size) + PAGE for size in sizes_P.tolist())
    head = int((offsets_LEP[..., 0] % PAGE).max()) if offsets_LEP.size else 0
    return align_up(int(sizes_P.sum()) + head)


def expert_read_bytes(index: CheckpointIndex) -> float:
    """Mean bytes asked of the device for one expert, alignment included."""
    packed = PackedExperts.of(index)
    if packed is not None:
        return packed.mean_bytes
    offsets_LEP, sizes_P, joined_LEP = _places(index)
    if not offsets_LEP.size:
        return 0.0
    border_LE1 = np.ones((*offsets_LEP.shape[:2], 1), bool)
    begins = offsets_LEP[np.concatenate([border_LE1, ~joined_LEP], axis=2)]
    ends = (offsets_LEP + sizes_P)[np.concatenate([~joined_LEP, border_LE1], axis=2)]
    read_bytes = int((-(-ends // PAGE) * PAGE).sum()) - int((begins // PAGE * PAGE).sum())
    return read_bytes / offsets_LEP[..., 0].size


def _places(index: CheckpointIndex) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Offsets and sizes of the parts of all experts, and whether the next part follows at once."""
    sizes_P = np.array([part.nbytes for part in index.expert_parts], np.int64)
    offsets_LEP = index.tables.expert_offset_LEP
    paths_LEP = index.tables.expert_path_LEP
    follows_LEP = offsets_LEP[..., :-1] + sizes_P[:-1] == offsets_LEP[..., 1:]
    return offsets_LEP, sizes_P, follows_LEP & (paths_LEP[..., :-1] == paths_LEP[..., 1:])
