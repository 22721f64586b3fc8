"""Rows that may be taken back: a pass over drafted tokens leaves the state as it was until some are kept.

The recurrent matrices and convolution tails run on copies, layer by layer; what the recurrence read
is noted. Keeping m rows replays m steps of the plain recurrence on the true state, with the same
operations in the same order as a pass of those rows alone, so no bit can differ. Latent cache rows
beyond the kept ones are overwritten with NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from twoends.checkpoint.config import ModelConfig
from twoends.kernels.ops import F32, KdaOutput, KdaState, Ops
from twoends.model.state import MlaState, SequenceState


@dataclass(frozen=True, slots=True, kw_only=True)
class KdaRows:
    """What one layer's recurrence read in a pass: convolution inputs, and keys, values, decays, betas."""

    q_TP: F32
    k_TP: F32
    v_TP: F32
    mixed: KdaOutput


class Tentative:
    """The notes of one tentative pass over `num_rows` tokens from the state's position on."""

    def __init__(self, state: SequenceState, num_rows: int) -> None:
        self._state, self._num_rows = state, num_rows
        self._rows: dict[int, KdaRows] = {}

    def working(self, layer: int) -> KdaState | MlaState:
        """What the pass may change: a copy of a KDA layer's state, an MLA layer's own (rows go after)."""
        true = self._state.layers[layer]
        if isinstance(true, MlaState):
            return true
        return KdaState(
            state_HKV=true.state_HKV.copy(),
            q_tail_3P=true.q_tail_3P.copy(),
            k_tail_3P=true.k_tail_3P.copy(),
            v_tail_3P=true.v_tail_3P.copy(),
        )

    def note(self, layer: int, rows: KdaRows) -> None:
        """Keeps what a layer's recurrence read."""
        self._rows[layer] = rows

    def keep(self, count: int, ops: Ops) -> None:
        """Moves the true state on by the first `count` rows; the rest never was."""
        assert 1 <= count <= self._num_rows
        state = self._state
        for layer, rows in self._rows.items():
            true = state.layers[layer]
            assert isinstance(true, KdaState)
            _shift(true.q_tail_3P, rows.q_TP[:count])
            _shift(true.k_tail_3P, rows.k_TP[:count])
            _shift(true.v_tail_3P, rows.v_TP[:count])
            ops.kda_steps(
                # The output is not used and no update reads the query.
                q_THK=rows.mixed.k_THK[:count],
                k_THK=rows.mixed.k_THK[:count],
                v_THV=rows.mixed.v_THV[:count],
                alpha_THK=rows.mixed.alpha_THK[:count],
                beta_TH=rows.mixed.beta_TH[:count],
                state_HKV=true.state_HKV,
            )
        start, end = state.position + count, state.position + self._num_rows
        for layer_state in state.layers:
            if isinstance(layer_state, MlaState):
                layer_state.cache_CM[start:end] = np.nan
        state.position += count


def tentative_bytes(config: ModelConfig, num_rows: int) -> int:
    """Memory of the notes of `num_rows` rows, and of one layer's copied state."""
    layers = config.num_layers - len(config.mla_layers)
    per_row = 7 * config.kda_width + config.kda_num_heads
    copy = config.kda_num_heads * config.kda_head_dim**2 + 3 * (config.conv_width - 1) * config.kda_width
    return 4 * (layers * num_rows * per_row + copy)


def _shift(tail_3P: F32, u_TP: F32) -> None:
    history = np.concatenate([tail_3P, u_TP])
    tail_3P[...] = history[len(u_TP) :]
