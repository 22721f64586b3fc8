"""Which rows of a pass belong to which sequence; what does not carry a sequence need not know."""

from __future__ import annotations

from dataclasses import dataclass

from twoends.model.state import SequenceState
from twoends.model.tentative import Tentative


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceRows:
    """Rows `first` .. `first + count - 1` of a pass: the next `count` tokens of one sequence, in order.

    With `tentative` the state stays as it is until that says how many of them to keep.
    """

    state: SequenceState
    first: int
    count: int
    tentative: Tentative | None = None

    @property
    def rows(self) -> slice:
        """Their place among the rows of the pass."""
        return slice(self.first, self.first + self.count)
