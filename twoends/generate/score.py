"""How well a model foretells a text: bits per byte, and how often its first choice is what comes next."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from twoends.engine.open import OpenModel
from twoends.kernels.ops import F32


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Sums over the tokens that had something before them: `nats` of surprise, `num_bytes` of text."""

    num_tokens: int
    num_right: int
    num_bytes: int
    nats: float

    @property
    def bits_per_byte(self) -> float:
        """Surprise per byte of text, in bits."""
        return self.nats / math.log(2) / self.num_bytes

    @property
    def accuracy(self) -> float:
        """Share of tokens that were the likeliest."""
        return self.num_right / self.num_tokens

    def __add__(self, other: Score) -> Score:
        return Score(
            num_tokens=self.num_tokens + other.num_tokens,
            num_right=self.num_right + other.num_right,
            num_bytes=self.num_bytes + other.num_bytes,
            nats=self.nats + other.nats,
        )


NOTHING = Score(num_tokens=0, num_right=0, num_bytes=0, nats=0.0)


def score_ids(
    model: OpenModel,
    ids: Sequence[int],
    *,
    bytes_of: Callable[[int], int],
    chunk: int,
    progress: Callable[[int], None] = lambda done: None,
) -> Score:
    """The score of a text from an empty state, in windows as long as the context, each from an empty state.

    `bytes_of` gives the bytes of text behind an id; `chunk` tokens go through in one pass, whose logits
    are all kept: the plan must have room for that many rows. `progress` gets the tokens done.
    """
    score = NOTHING
    for start in range(0, len(ids), model.state.capacity):
        window = ids[start : start + model.state.capacity]
        model.state.reset()
        for first in range(0, len(window) - 1, chunk):
            part = list(window[first : min(first + chunk, len(window) - 1)])
            logits_TW = model.run_pass(part, layer_done=lambda done: None, all_rows=True)
            wanted = window[first + 1 : first + 1 + len(part)]
            for logits_W, token_id in zip(logits_TW, wanted, strict=True):
                score += _row_score(logits_W, token_id, num_bytes=bytes_of(token_id))
            progress(start + first + len(part))
    return score


def _row_score(logits_W: F32, token_id: int, *, num_bytes: int) -> Score:
    """One token's: in binary64, since a sum of many small surprises is told to four digits."""
    top = float(logits_W.max())
    total = float(np.exp(logits_W.astype(np.float64) - top).sum())
    nats = math.log(total) + top - float(logits_W[token_id])
    is_right = int(logits_W.argmax()) == token_id
    return Score(num_tokens=1, num_right=int(is_right), num_bytes=num_bytes, nats=nats)
