"""Cache policies for comparison only: LRU, LFU, S3-FIFO, and Belady's, which knows the future.

Each takes the whole sequence of requests and the number of slots, and gives the number of hits. A
missed key is always placed. The engine's own policy is in engine/policies.py.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict, deque
from collections.abc import Hashable, Sequence

_NEVER = 1 << 62
# S3-FIFO's published share of the small queue, and the cap of its counters.
_SMALL_SHARE = 0.1
_MOST_COUNTED = 3


def lru_hits(requests: Sequence[Hashable], num_slots: int) -> int:
    """The key used longest ago gives way."""
    order: OrderedDict[Hashable, None] = OrderedDict()
    hits = 0
    for key in requests:
        if key in order:
            order.move_to_end(key)
            hits += 1
            continue
        if len(order) >= num_slots:
            order.popitem(last=False)
        order[key] = None
    return hits


def lfu_hits(requests: Sequence[Hashable], num_slots: int) -> int:
    """The key used least often so far gives way, the longest unused among equals; counts outlive a stay."""
    count: Counter[Hashable] = Counter()
    kept: dict[Hashable, tuple[int, int]] = {}
    heap: list[tuple[int, int, Hashable]] = []
    hits = 0
    for now, key in enumerate(requests):
        count[key] += 1
        if key in kept:
            hits += 1
        elif len(kept) >= num_slots:
            uses, since, victim = heapq.heappop(heap)
            while kept.get(victim) != (uses, since):
                uses, since, victim = heapq.heappop(heap)
            del kept[victim]
        kept[key] = (count[key], now)
        heapq.heappush(heap, (count[key], now, key))
    return hits


def belady_hits(requests: Sequence[Hashable], num_slots: int) -> int:
    """The key whose next use is farthest gives way: the most hits when every missed key is placed."""
    next_use = [_NEVER] * len(requests)
    last: dict[Hashable, int] = {}
    for now in range(len(requests) - 1, -1, -1):
        next_use[now] = last.get(requests[now], _NEVER)
        last[requests[now]] = now
    kept: dict[Hashable, int] = {}
    # Ties (never used again) fall to the latest comer, so keys need not be comparable.
    heap: list[tuple[int, int, Hashable]] = []
    hits = 0
    for now, key in enumerate(requests):
        if key in kept:
            hits += 1
        elif len(kept) >= num_slots:
            farthest, _, victim = heapq.heappop(heap)
            while kept.get(victim) != -farthest:
                farthest, _, victim = heapq.heappop(heap)
            del kept[victim]
        kept[key] = next_use[now]
        heapq.heappush(heap, (-next_use[now], -now, key))
    return hits


def s3fifo_hits(requests: Sequence[Hashable], num_slots: int) -> int:
    """Three queues (Yang et al., SOSP 2023): small, main, and the names of what the small one gave up."""
    cache = _S3Fifo(num_slots)
    return sum(cache.ask(key) for key in requests)


class _S3Fifo:
    """New keys enter the small queue; those used twice there, or asked for again soon, enter main."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._most_small = max(1, int(num_slots * _SMALL_SHARE))
        self._most_ghosts = num_slots - self._most_small
        self._small: deque[Hashable] = deque()
        self._main: deque[Hashable] = deque()
        self._ghosts: OrderedDict[Hashable, None] = OrderedDict()
        self._uses: dict[Hashable, int] = {}

    def ask(self, key: Hashable) -> bool:
        """Whether `key` was here; it is afterwards."""
        if key in self._uses:
            self._uses[key] = min(self._uses[key] + 1, _MOST_COUNTED)
            return True
        while len(self._uses) >= self._num_slots:
            if len(self._small) >= self._most_small or not self._main:
                self._leave_small()
            else:
                self._leave_main()
        if key in self._ghosts:
            del self._ghosts[key]
            self._main.append(key)
        else:
            self._small.append(key)
        self._uses[key] = 0
        return False

    def _leave_small(self) -> None:
        """Moves used keys to main until one is given up, or the small queue is empty."""
        while self._small:
            key = self._small.popleft()
            if self._uses[key] > 1:
                self._uses[key] = 0
                self._main.append(key)
                continue
            del self._uses[key]
            self._ghosts[key] = None
            if len(self._ghosts) > self._most_ghosts:
                self._ghosts.popitem(last=False)
            return

    def _leave_main(self) -> None:
        while True:
            key = self._main.popleft()
            if self._uses[key] == 0:
                del self._uses[key]
                return
            self._uses[key] -= 1
            self._main.append(key)
