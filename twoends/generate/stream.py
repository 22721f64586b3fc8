"""Ids -> pieces of text, each given out as soon as nothing that follows can change it."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Literal

from twoends.generate.stop import StopMatcher
from twoends.generate.tokenizer import Tokenizer

Stopped = Literal["stop_id", "stop_string"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Text that is sure, maybe empty. `stopped` says what ended the text, `stop` which id or string."""

    text: str
    stopped: Stopped | None = None
    stop: int | str | None = None


class TextStream:
    """The text of one sequence of generated ids.

    The pieces joined are the UTF-8 decoding of all bytes joined, invalid sequences as U+FFFD the way
    bytes.decode(errors="replace") does it, cut before the first stop string. A piece never ends in
    half a character. Special tokens give no bytes unless `show_specials`; a stop id never does.

    `stop_ids` are usually the tokenizer's own. Raises OptionError for an empty stop string.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop_strings: Sequence[str],
        stop_ids: AbstractSet[int],
        show_specials: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._matcher = StopMatcher(stop_strings)
        self._stop_ids = frozenset(stop_ids)
        self._show_specials = show_specials
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._ended = False

    def push(self, token_id: int) -> Piece:
        """Takes the next id. With a stop the piece holds all text that remains, and the stream ends.

        Raises TokenizerError for an id outside the vocabulary.
        """
        assert not self._ended, "a stream that has ended takes no more ids"
        special = self._tokenizer.is_special(token_id)
        if token_id in self._stop_ids:
            return self._end(stopped="stop_id", stop=token_id)
        if special and not self._show_specials:
            return Piece(text="")
        text, found = self._matcher.push(self._decoder.decode(self._tokenizer.token_bytes(token_id)))
        if found is None:
            return Piece(text=text)
        self._ended = True
        return Piece(text=text, stopped="stop_string", stop=found)

    def finish(self) -> Piece:
        """No more ids come (a limit was reached): the rest, half a character as U+FFFD.

        After a stop there is no rest, and the piece is empty.
        """
        return Piece(text="") if self._ended else self._end(stopped=None, stop=None)

    def _end(self, *, stopped: Stopped | None, stop: int | None) -> Piece:
        self._ended = True
        # a U+FFFD that appears only now may still complete a stop string
        text, found = self._matcher.push(self._decoder.decode(b"", final=True))
        if found is not None:
            return Piece(text=text, stopped="stop_string", stop=found)
        return Piece(text=text + self._matcher.flush(), stopped=stopped, stop=stop)
