"""Where a stop string ends a text that arrives in pieces.

The text ends at the stop string that is complete first, counted in characters; of two that are
complete at the same character the longer counts. So the result doesn't depend on the pieces.
"""

from __future__ import annotations

from collections.abc import Sequence

from twoends.errors import OptionError


class StopMatcher:
    """Takes text, gives back what is surely before any stop string, and holds the rest.

    Raises OptionError for an empty stop string, which would end every text before it begins.
    """

    def __init__(self, stop_strings: Sequence[str]) -> None:
        if isinstance(stop_strings, str):
            raise OptionError(f"The stop strings are one string, {stop_strings!r}; give a sequence of them.")
        for stop in stop_strings:
            if not isinstance(stop, str) or not stop:
                raise OptionError(f"The stop string {stop!r} has no character; give at least one.")
        # longest first, so that the first one found complete is the longest
        ordered = sorted(set(stop_strings), key=len, reverse=True)
        self._prefixes = [_Prefix(stop) for stop in ordered]
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """(text that is sure now, the stop string that ended it or None). Ended, it takes no more."""
        buffer = self._held + text
        for end in range(len(self._held) + 1, len(buffer) + 1):
            # every prefix must see the character, also when one of them is complete
            complete = [prefix.stop for prefix in self._prefixes if prefix.advance(buffer[end - 1])]
            if complete:
                self._held = ""
                return buffer[: end - len(complete[0])], complete[0]
        sure = len(buffer) - max((prefix.length for prefix in self._prefixes), default=0)
        self._held = buffer[sure:]
        return buffer[:sure], None

    def flush(self) -> str:
        """The text that was held back, once it is known that no more will come."""
        held, self._held = self._held, ""
        return held


class _Prefix:
    """How much of one stop string the text ends with (Knuth, Morris, Pratt)."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.length = 0
        # fallback[n]: the longest prefix that is also a proper suffix of the first n characters
        self._fallback = [0, 0]
        for end in range(1, len(stop)):
            length = self._fallback[end]
            while length and stop[length] != stop[end]:
                length = self._fallback[length]
            self._fallback.append(length + (stop[length] == stop[end]))

    def advance(self, character: str) -> bool:
        """Takes one character; whether the stop string is complete with it."""
        while self.length and self.stop[self.length] != character:
            self.length = self._fallback[self.length]
        if self.stop[self.length] == character:
            self.length += 1
        return self.length == len(self.stop)
