"""How often guesses come true, by layer and rank: what is worth reading on a guess."""

from __future__ import annotations

# Counts of the last couple of dozen guesses weigh most.
_MEMORY = 0.95
_FEWEST = 4.0
# A wrong guess costs a read; a right one saves only the waiting for it.
WORTH_READING = 0.5
# A layer none of whose ranks is worth reading is asked again once in so many tokens.
_ASK_AGAIN = 8


class Recall:
    """Decayed counts of guesses that would be read, and of those that were then chosen."""

    def __init__(self, *, num_layers: int, num_ranks: int, always: bool) -> None:
        """`always` takes every guess for worth reading (the counts go on)."""
        self._always = always
        self._made = [[0.0] * num_ranks for _ in range(num_layers)]
        self._right = [[0.0] * num_ranks for _ in range(num_layers)]
        self._skipped = [0] * num_layers

    def is_worth_reading(self, layer: int, rank: int) -> bool:
        """Whether guesses of this rank came true often enough, and were seen often enough to know."""
        made = self._made[layer][rank]
        return self._always or (made >= _FEWEST and self._right[layer][rank] >= WORTH_READING * made)

    def is_worth_asking(self, layer: int) -> bool:
        """Whether to guess at all for a layer now: not at every token where no rank is worth reading."""
        ranks = range(len(self._made[layer]))
        if any(self._made[layer][rank] < _FEWEST or self.is_worth_reading(layer, rank) for rank in ranks):
            return True
        self._skipped[layer] = (self._skipped[layer] + 1) % _ASK_AGAIN
        return self._skipped[layer] == 0

    def learn(self, layer: int, rank: int, *, right: bool) -> None:
        """A guess of this rank, and whether the expert was chosen."""
        self._made[layer][rank] = self._made[layer][rank] * _MEMORY + 1
        self._right[layer][rank] = self._right[layer][rank] * _MEMORY + right
