"""Experts that nobody has asked for yet, read into their slots while the disk has nothing better to do."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from twoends.engine.guesses import Content
from twoends.engine.policies import Key

# Few, because a demand looks through all reads that have not begun; enough for the time of one layer.
_AT_ONCE = 16


class Filling:
    """What is left to be read where every expert has a slot, and what is on its way."""

    def __init__(self, keys: Iterable[Key]) -> None:
        """`keys` of all experts, in the order of use."""
        self._left = deque(keys)
        self._on_their_way: list[Content] = []

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to be begun."""
        return not self._left

    def next_key(self) -> Key | None:
        """The next expert to be read; None while enough are on their way, and at the end."""
        self._on_their_way = [
            content for content in self._on_their_way if any(read.pending for read in content.reads)
        ]
        if not self._left or len(self._on_their_way) >= _AT_ONCE:
            return None
        return self._left.popleft()

    def begun(self, content: Content) -> None:
        """An expert's reads have been queued."""
        self._on_their_way.append(content)
