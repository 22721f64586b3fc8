"""Drafts by prompt lookup: what followed the last time the sequence ended as it does now.

Where a run of ids ended last is kept in tables of fixed size, so that memory is known before the run.
Where runs crowd, the oldest is forgotten. What is found is compared id by id, so a draft may be missed
but is never made up.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# Suffixes of these lengths are remembered; the longest one that occurred before counts.
_LENGTHS = (6, 4, 3, 2)
_ID_BYTES = 4
_PLACES_PER_RUN = 4


class PromptLookup:
    """Remembers where each short run of ids ended last, and proposes what came next."""

    def __init__(self, capacity: int, *, before: Sequence[int] = ()) -> None:
        """Room for sequences of `capacity` ids; `before` is an earlier text to copy from as well."""
        self._ids_N = np.full(len(before) + capacity, 0, np.int32)
        self._num_before = len(before)
        self._size = 0
        places = _places(len(before) + capacity)
        # The end of the run whose hash leads here; 0 for none, since no run ends there.
        self._ends = {length: np.full(places, 0, np.int32) for length in _LENGTHS}
        self._enter(before)

    def extend(self, ids: list[int]) -> None:
        """The sequence is `ids` now; it only ever grows."""
        self._enter(ids[self._size - self._num_before :])

    def draft(self, most: int) -> list[int]:
        """Up to `most` ids that followed the same suffix before; empty when it is new."""
        end = self._size
        for length in _LENGTHS if most > 0 else ():
            if end - self._num_before >= length:
                suffix = self._run(end, length)
                found = self._find(suffix)
                if found:
                    return self._repeat(found, end, most)
        return []

    def _enter(self, ids: Sequence[int]) -> None:
        for token_id in ids:
            # A run is entered when the id after it comes, so a suffix never finds itself.
            end = self._size
            for length in _LENGTHS:
                if end >= length:
                    self._remember(self._run(end, length), end)
            self._ids_N[end] = token_id
            self._size += 1

    def _run(self, end: int, length: int) -> tuple[int, ...]:
        return tuple(self._ids_N[end - length : end].tolist())

    def _remember(self, run: tuple[int, ...], end: int) -> None:
        """In its own place, else a free one, else that of the oldest run of a few."""
        ends_P = self._ends[len(run)]
        places = self._places(run)
        for place in places:
            known = int(ends_P[place])
            if not known or self._run(known, len(run)) == run:
                ends_P[place] = end
                return
        ends_P[min(places, key=ends_P.__getitem__)] = end

    def _find(self, run: tuple[int, ...]) -> int:
        """Where the same run ended last; 0 if it is not known."""
        ends_P = self._ends[len(run)]
        for place in self._places(run):
            known = int(ends_P[place])
            if known and self._run(known, len(run)) == run:
                return known
        return 0

    def _places(self, run: tuple[int, ...]) -> list[int]:
        # The hash of a tuple of numbers is the same in every process.
        size = len(self._ends[len(run)])
        return [(hash(run) + i) % size for i in range(_PLACES_PER_RUN)]

    def _repeat(self, found: int, end: int, most: int) -> list[int]:
        # The copy may run into itself: a loop is drafted round and round.
        at_M = found + np.arange(most) % (end - found)
        ids: list[int] = self._ids_N[at_M].tolist()
        return ids


def lookup_bytes(capacity: int) -> int:
    """Memory of a lookup over that many ids."""
    return _ID_BYTES * (capacity + len(_LENGTHS) * _places(capacity))


def _places(capacity: int) -> int:
    return 2 * capacity + 1
