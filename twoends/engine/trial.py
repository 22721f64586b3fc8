"""A trial of scores: which of several would have kept most of what a router chose next."""

from __future__ import annotations

import numpy as np

from twoends.kernels.ops import F32, I32

# What was right is counted over about the last fifty tokens.
_MEMORY = 0.98
# Another score takes over where it is right so much more often.
_MARGIN = 1.05


class Trial:
    """Counts for each score how many chosen experts it had among the best, with an equal share of slots.

    The first score is `best` until another has been right clearly more often; it begins one token's
    choices ahead, so that a handful of tokens decides nothing.
    """

    def __init__(self, num_scores: int, *, num_slots: int, num_layers: int, num_experts: int) -> None:
        self.best = 0
        self._share = min(max(round(num_slots / max(num_layers, 1)), 1), max(num_experts - 1, 1))
        self._num_layers = max(num_layers, 1)
        self._memory = _MEMORY ** (1 / self._num_layers)
        self._chosen_E = np.full(num_experts, False)
        self._right = [0.0] * num_scores
        self._begun = False

    def count(self, ids_S: I32, *scores_E: F32) -> None:
        """A token chose these experts of a layer, whose scores are those after the token before."""
        if not self._begun:
            self._begun, self._right[0] = True, float(ids_S.size * self._num_layers)
        self._chosen_E[ids_S] = True
        for i, score_E in enumerate(scores_E):
            self._right[i] = self._right[i] * self._memory + self._kept(score_E)
        self._chosen_E[ids_S] = False
        leader = max(range(len(scores_E)), key=self._right.__getitem__)
        if self._right[leader] > self._right[self.best] * _MARGIN:
            self.best = leader

    def _kept(self, score_E: F32) -> int:
        """How many of the chosen are among the best by this score."""
        first = score_E.size - self._share
        best = np.argpartition(score_E, first)[first:]
        return int(np.count_nonzero(self._chosen_E[best[score_E[best] > 0]]))
