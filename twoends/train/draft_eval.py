"""How often a draft layer is right on held-out text, step by step, beside other ways of guessing."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from twoends.train.draft_layer import DraftLayer
from twoends.train.draft_loop import DraftBatch, DraftRun
from twoends.train.draft_loss import Rates, rates
from twoends.train.rows import heldout_batches

# Ids of a document -> what would be guessed, up to so many ids, after each of them.
Guess = Callable[[list[int], int], list[list[int]]]


@dataclass(slots=True, kw_only=True)
class DraftRates:
    """Means over the counted bases of each unrolled step, on the text as it is (every earlier id right).

    overlap, same_draw, greedy   as draft_loss.Rates has them
    guessed                      share of the bases with a guess; without one nothing is kept
    kept                         ids that a pass keeps, verified greedily: one, and the drafts up to the
                                 first that is wrong
    """

    overlap: list[float] = field(default_factory=list)
    same_draw: list[float] = field(default_factory=list)
    greedy: list[float] = field(default_factory=list)
    guessed: list[float] = field(default_factory=list)
    kept: float = 1.0


class _Sums:
    """Sums of one way of guessing over batches."""

    def __init__(self, steps: int) -> None:
        # overlap, same_draw, greedy, guessed, counted
        self._sums = np.zeros((steps, 5))
        self._kept = self._chains = 0.0

    def add(self, taught: DraftBatch, found: list[Rates], guessed: list[Tensor]) -> None:
        """`found` [N] of each step, of the counted bases; `guessed` which of them have a guess."""
        steps = len(found)
        last = taught.counted(steps - 1)
        chain = torch.ones(int(last.sum()))
        for s, (rate, has) in enumerate(zip(found, guessed, strict=True)):
            counted = taught.counted(s)
            means = (*rate, has.float(), torch.ones_like(rate.greedy))
            self._sums[s] += [float(part.double().sum()) for part in means]
            right = torch.zeros(counted.shape)
            right[counted] = rate.greedy
            chain = chain * right[:, : last.shape[1]][last]
            self._kept += float(chain.sum())
        self._chains += len(chain)

    def means(self) -> DraftRates:
        """Of all batches."""
        shares = self._sums[:, :4] / np.maximum(self._sums[:, 4:], 1)
        overlap, same_draw, greedy, guessed = (column.tolist() for column in shares.T)
        kept = 1 + self._kept / max(self._chains, 1)
        return DraftRates(overlap=overlap, same_draw=same_draw, greedy=greedy, guessed=guessed, kept=kept)


@torch.no_grad()
def evaluate_drafts(run: DraftRun, *, guesses: Mapping[str, Guess]) -> dict[str, DraftRates]:
    """Rates on the held-out text of all sources: of the layers as they will be stored, and of `guesses`."""
    steps = run.recipe.draft.unrolled_steps
    layers = {name: as_stored(layer).multiply_in(None) for name, layer in run.layers.items()}
    sums = {name: _Sums(steps) for name in (*layers, *guesses)}
    for rows in run.text.heldout.values():
        for ids_BT1 in heldout_batches(rows, batch_rows=1):
            taught = DraftBatch(run.target, ids_BT1, features=run.recipe.draft.features)
            for name, layer in layers.items():
                logits = run.logits(layer, taught)
                found = [rates(torch.softmax(q, -1), taught.expected(s)) for s, q in enumerate(logits)]
                sums[name].add(taught, found, [torch.ones(len(q), dtype=torch.bool) for q in logits])
            for name, guess in guesses.items():
                ids_sBT = _guessed_ids(taught, guess, steps=steps)
                of_steps = [ids[taught.counted(s)] for s, ids in enumerate(ids_sBT)]
                found = [_certain(ids, taught.expected(s)) for s, ids in enumerate(of_steps)]
                sums[name].add(taught, found, [ids >= 0 for ids in of_steps])
    return {name: of_name.means() for name, of_name in sums.items()}


def as_stored(layer: DraftLayer) -> DraftLayer:
    """A copy whose matrices are rounded as the export rounds them."""
    stored = copy.deepcopy(layer)
    for parameter in stored.parameters():
        if parameter.ndim == 2:
            parameter.data = parameter.data.to(torch.bfloat16).float()
    return stored


def _certain(ids_N: Tensor, p_NW: Tensor) -> Rates:
    """The rates of one guess without a distribution: it is kept when the model's draw is it."""
    chance = p_NW.gather(-1, ids_N.clamp_min(0)[:, None])[:, 0] * (ids_N >= 0)
    greedy = (ids_N == p_NW.argmax(-1)).float()
    return Rates(overlap=chance, same_draw=chance, greedy=greedy)


def _guessed_ids(taught: DraftBatch, guess: Guess, *, steps: int) -> list[Tensor]:
    """[B, T - 1 - s] for each step: what is guessed for base t; -1 for nothing."""
    batch, tokens = taught.inputs_BT.shape
    found = [torch.full((batch, tokens - 1 - s), -1) for s in range(steps)]
    for b in range(batch):
        for begin, end in _documents(taught.documents_BT[b]):
            after = guess(taught.inputs_BT[b, begin:end].tolist(), steps)
            for t in range(begin, end - 1):
                # Base t knows its own token and the next one.
                for s, token in enumerate(after[t + 1 - begin]):
                    if t < found[s].shape[1]:
                        found[s][b, t] = token
    return found


def _documents(documents_T: Tensor) -> list[tuple[int, int]]:
    borders = (documents_T.diff() != 0).nonzero().flatten() + 1
    ends = [*borders.tolist(), len(documents_T)]
    return list(zip([0, *ends[:-1]], ends, strict=True))
