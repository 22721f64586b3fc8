"""Look-ahead: the next layer's router, asked too early, guesses which experts to begin to read.

After a layer the next layer's router is applied to the residual stream as it is then, before that
layer's attention. What it would choose and no slot holds is read into rooms of its own, after all
reads that somebody waits for and all trunk panels. The true router then takes what is right; the
rest is withdrawn where no thread has begun it. Only in passes of one row: many rows choose so many
experts that a guess is nothing more than another order of the same reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from twoends.checkpoint.config import ModelConfig
from twoends.engine.guesses import Guesses
from twoends.kernels.ops import F32, Matrix, Ops
from twoends.model.attnres import Residual
from twoends.model.weights import Panel, Weights

LookAheadMode = Literal["auto", "on", "off"]

# Rooms for guesses, and so the most that is read on guesses for one layer.
MOST_ROOMS = 8
_KEPT = ("post_attn_norm", "router_bias", "mlp_res_norm", "mlp_res_proj")

# The router's panels of a layer with their first rows; None while they are not all in memory.
Router = Callable[[int], list[tuple[int, Matrix]] | None]


@dataclass(frozen=True, slots=True)
class _Kept:
    """Small tensors of a layer that the guess for it needs; implements `Weights.vector`."""

    vectors: dict[str, F32]

    def vector(self, name: str) -> F32:
        return self.vectors[name]

    def rows(self, name: str) -> int:
        raise AssertionError("no matrix is kept")

    def panels(self, names: tuple[str, ...]) -> Iterator[list[Panel]]:
        raise AssertionError("no matrix is kept")


class LookAhead:
    """Guesses for the layer after the one that has just gone through."""

    def __init__(self, config: ModelConfig, *, router: Router, guesses: Guesses) -> None:
        self._config, self._router, self._guesses = config, router, guesses
        self._kept: dict[int, _Kept] = {}

    def after_layer(self, layer: int, weights: Weights, residual: Residual, ops: Ops) -> None:
        """Keeps what guessing for this layer needs, the first time; guesses for the next."""
        if self._config.is_moe(layer) and layer not in self._kept:
            self._kept[layer] = _keep(weights, self._config)
        can_guess = residual.num_rows == 1 and layer + 1 in self._kept
        if can_guess and self._guesses.is_worth_asking(layer + 1):
            self._guess(layer + 1, residual, ops)

    def _guess(self, layer: int, residual: Residual, ops: Ops) -> None:
        panels = self._router(layer)
        if panels is None:
            return
        kept = self._kept[layer]
        h_1D = residual.input(kept, "mlp_res", ops)
        x_1D = ops.rms_norm(h_1D, kept.vector("post_attn_norm"), self._config.eps)
        logits_1E = np.empty((1, self._config.num_experts), np.float32)
        ops.products(x_1D, [(matrix, logits_1E, first_row) for first_row, matrix in panels])
        # Not the operation `route`: its bits don't matter here, and it refuses what is not finite.
        with np.errstate(over="ignore", invalid="ignore"):
            score_E = 1 / (1 + np.exp(-logits_1E[0])) + kept.vector("router_bias")
        if np.isfinite(score_E).all():
            order_E = np.argsort(-score_E, kind="stable")
            self._guesses.begin(layer, order_E[: self._config.experts_per_token].astype(np.int32))


def look_ahead_bytes(config: ModelConfig) -> int:
    """Memory of the small tensors that are kept for guessing."""
    vectors = (3 if config.attnres_block is not None else 1) * config.hidden_size
    return 4 * len(config.moe_layers) * (vectors + config.num_experts)


def _keep(weights: Weights, config: ModelConfig) -> _Kept:
    names = _KEPT if config.attnres_block is not None else _KEPT[:2]
    return _Kept({name: weights.vector(name).copy() for name in names})
