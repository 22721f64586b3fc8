"""Drafts by prompt lookup: what followed the last time the sequence ended as it does now."""

from __future__ import annotations

# Suffixes of these lengths are remembered; the longest one that occurred before counts.
_LENGTHS = (6, 4, 3, 2)


class PromptLookup:
    """Remembers where each short run of ids ended last, and proposes what came next."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}

    def extend(self, ids: list[int]) -> None:
        """The sequence is `ids` now; it only ever grows."""
        for token_id in ids[len(self._ids) :]:
            # A run is entered when the id after it comes, so a suffix never finds itself.
            end = len(self._ids)
            for length in _LENGTHS:
                if end >= length:
                    self._ends[tuple(self._ids[end - length : end])] = end
            self._ids.append(token_id)

    def draft(self, most: int) -> list[int]:
        """Up to `most` ids that followed the same suffix before; empty when it is new."""
        if most < 1:
            return []
        end = len(self._ids)
        for length in _LENGTHS:
            if end >= length:
                found = self._ends.get(tuple(self._ids[end - length :]))
                if found is not None:
                    return self._repeat(found, end, most)
        return []

    def _repeat(self, found: int, end: int, most: int) -> list[int]:
        # The copy may run into itself: a loop is drafted round and round.
        period = end - found
        return [self._ids[found + i % period] for i in range(most)]
