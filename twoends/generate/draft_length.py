"""How many ids to draft: the number with the fewest counted bytes per kept token.

A verified pass of k drafts carries k + 1 rows. It reads the streamed trunk once, and the experts
of all its rows; rows of one text share experts. With acceptance a the pass keeps
1 + a + ... + a^k tokens. Where nothing is streamed, a draft saves nothing and none is made.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_DRAFT = 7
# Weight of the newest pass in the measured acceptance.
_MEMORY = 0.1
_FIRST_GUESS = 0.6
# After so many passes without a draft, by and large, one is tried again.
_REST_PASSES = 50
# Distinct experts of m rows of one text, in experts of one row (measured on a real K3 trace:
# 26.5, 44.1, 75.5 distinct of 16 a row for 2, 4 and 8 rows); interpolated between.
_DISTINCT = (1.0, 1.66, 2.24, 2.76, 3.26, 3.76, 4.24, 4.72)


@dataclass(slots=True)
class DraftLength:
    """Chooses and learns; `streamed_bytes` and `expert_bytes` are those of one decoded token.

    `bytes_per_draft` is what the source of the drafts reads for each of them.
    """

    streamed_bytes: int
    expert_bytes: int
    bytes_per_draft: int = 0
    acceptance: float = _FIRST_GUESS

    def choose(self) -> int:
        """The draft length whose pass costs the fewest bytes per kept token; 0 for none."""
        return min(range(MAX_DRAFT + 1), key=lambda k: (self.bytes_per_token(k), k))

    @property
    def least_bytes_per_token(self) -> float:
        """Expected bytes per kept token with the draft length that is chosen."""
        return self.bytes_per_token(self.choose())

    def bytes_per_token(self, k: int) -> float:
        """Expected bytes per kept token with k drafts."""
        kept = sum(self.acceptance**i for i in range(k + 1))
        verified = self.streamed_bytes + self.expert_bytes * _DISTINCT[k]
        return (verified + k * self.bytes_per_draft) / kept

    def learn(self, *, drafted: int, kept: int) -> None:
        """`kept` of `drafted` ids were right; only those up to the first wrong one were tried."""
        tried = min(drafted, kept + 1)
        for i in range(tried):
            self.acceptance += _MEMORY * ((1.0 if i < kept else 0.0) - self.acceptance)

    def rest(self) -> None:
        """A pass without a draft: what was learnt ages, since another part of a text may be another."""
        self.acceptance += (_FIRST_GUESS - self.acceptance) / _REST_PASSES
