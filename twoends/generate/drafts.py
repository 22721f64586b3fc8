"""Where drafted ids come from: the text so far, a smaller model or a draft layer, or one after the other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

from twoends.engine.arena import align_up
from twoends.engine.budget import Row
from twoends.generate.draft_length import DraftLength
from twoends.generate.lookup import PromptLookup, lookup_bytes

Source = Literal["lookup", "model"]
# So often a source that was wrong lately may show that another part of the text is another.
_GIVEN_ORDER_EVERY = 16


class Drafter(Protocol):
    """Guesses what comes next. A guess costs time and bytes, never a bit of the output."""

    # Bytes that are read from the disk for each proposed id.
    bytes_per_id: int

    def propose(self, ids: list[int], count: int) -> list[int]:
        """Up to `count` ids that may follow `ids`, all that is known; empty when there is no guess.

        From call to call `ids` only grows.
        """

    def accept(self, count: int) -> None:
        """The first `count` ids of the last proposal were right; the others never were."""


class LookupDrafter:
    """What followed the last time a text ended as this one does now."""

    bytes_per_id = 0

    def __init__(self, *, context_tokens: int, before: list[int]) -> None:
        """`before` is an earlier text, to be copied from like the part of this one that is known."""
        self._lookup = PromptLookup(context_tokens, before=before)

    def propose(self, ids: list[int], count: int) -> list[int]:
        """A copy of the past, or nothing."""
        self._lookup.extend(ids)
        return self._lookup.draft(count)

    def accept(self, count: int) -> None:
        """The text itself says what was right."""


@dataclass(slots=True, kw_only=True)
class Tally:
    """Ids that one source proposed for verification, and those that were right.

    `tried[n]` are those in place n of a proposal with every place before it right, `right[n]` of them were.
    """

    drafted: int = 0
    accepted: int = 0
    tried: list[int] = field(default_factory=list)
    right: list[int] = field(default_factory=list)

    def add(self, *, drafted: int, accepted: int) -> None:
        """How one proposal fared."""
        self.drafted += drafted
        self.accepted += accepted
        more = [0] * (drafted - len(self.tried))
        self.tried += more
        self.right += more
        for place in range(min(drafted, accepted + 1)):
            self.tried[place] += 1
            self.right[place] += place < accepted


class Drafts:
    """Asks its sources, the best first; each has a length of its own, learnt from its own acceptance.

    Best is what has lately cost the fewest bytes per kept id; before anything is known, and now and then
    later, it is the order that they were given in.
    """

    def __init__(
        self, sources: dict[Source, Drafter], *, most: int, streamed_bytes: int, expert_bytes: int
    ) -> None:
        """`most` rows may be drafted; the bytes are those of one decoded token of the model that verifies."""
        self._sources, self._most = sources, most
        self._lengths = {
            name: DraftLength(
                streamed_bytes=streamed_bytes,
                expert_bytes=expert_bytes,
                bytes_per_draft=source.bytes_per_id,
            )
            for name, source in sources.items()
        }
        self.tallies = {name: Tally() for name in sources}
        self._last: Source | None = None
        self._num_asked = 0

    def propose(self, ids: list[int], *, most: int) -> list[int]:
        """The first source's guess that is not empty; none where a guess would cost more than it saves."""
        for name in self._in_turn():
            source = self._sources[name]
            length = self._lengths[name].choose()
            if not length:
                self._lengths[name].rest()
            count = min(length, self._most, most)
            draft = source.propose(ids, count) if count > 0 else []
            if draft:
                self._last = name
                return draft
        return []

    def _in_turn(self) -> list[Source]:
        self._num_asked += 1
        names = list(self._sources)
        if self._num_asked % _GIVEN_ORDER_EVERY == 0:
            return names
        return sorted(names, key=lambda name: self._lengths[name].least_bytes_per_token)

    def learn(self, *, drafted: int, accepted: int) -> None:
        """How the last proposal fared."""
        assert self._last is not None, "something was proposed"
        self._lengths[self._last].learn(drafted=drafted, kept=accepted)
        self._sources[self._last].accept(accepted)
        self.tallies[self._last].add(drafted=drafted, accepted=accepted)


def lookup_row(num_tokens: int) -> Row:
    """What the lookup holds over a context, and an earlier text, of so many tokens in all."""
    size = align_up(lookup_bytes(num_tokens))
    return Row(name="prompt lookup", num_bytes=size, remark=f"over {num_tokens:,} tokens")
