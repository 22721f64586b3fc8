"""The residual stream: plain, or attention over snapshots of earlier blocks (K3 report 2.2)."""

from __future__ import annotations

import numpy as np

from twoends.checkpoint.config import ModelConfig
from twoends.kernels.ops import F32, Ops
from twoends.model.weights import Weights


class Residual:
    """`sources_NTD`: snapshots of earlier blocks, then the running sum as the last used row.

    A snapshot keeps the raw running sum, never the mix; the mix never replaces the sum
    (specification 6, pitfalls 10 and 12).
    """

    def __init__(self, embedding_TD: F32, config: ModelConfig) -> None:
        self._config = config
        self._sources_NTD = np.empty((num_sources(config), *embedding_TD.shape), embedding_TD.dtype)
        self._sources_NTD[0] = embedding_TD
        self._last = 0
        self._cleared = False

    def input(self, weights: Weights, part: str, ops: Ops) -> F32:
        """What a half layer reads: h_TD. `part` is attn_res, mlp_res or output_res."""
        if self._last == 0 and not self._cleared:
            embedding_TD: F32 = self._sources_NTD[0]
            return embedding_TD
        f_D = weights.vector(f"{part}_norm") * weights.vector(f"{part}_proj")
        return ops.attnres_mix(self._sources_NTD[: self._last + 1], f_D, self._config.eps)

    @property
    def num_rows(self) -> int:
        """Tokens of this pass."""
        return int(self._sources_NTD.shape[1])

    def block(self, number: int) -> F32:
        """The running sum at the end of block `number` (from 0), after the last layer: b_TD."""
        end_TD: F32 = self._sources_NTD[number + 1]
        return end_TD

    def snapshot(self) -> None:
        """Banks the running sum and starts a new, empty one."""
        self._last += 1
        self._cleared = True

    def add(self, delta_TD: F32) -> None:
        """Adds the output of a half layer to the running sum."""
        if self._cleared:
            self._sources_NTD[self._last] = delta_TD
            self._cleared = False
        else:
            self._sources_NTD[self._last] += delta_TD


def num_sources(config: ModelConfig) -> int:
    """Rows that the residual stream of a pass needs: all snapshots and the running sum."""
    if config.attnres_block is None:
        return 1
    return 1 + -(-config.num_layers // config.attnres_block)
