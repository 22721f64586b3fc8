"""One layer: residual in, attention, residual in, mixture; and the head after the last."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from twoends.checkpoint.config import ModelConfig
from twoends.kernels.ops import F32, KdaState, Ops
from twoends.model.attnres import Residual
from twoends.model.kda import KdaPart, kda_attention
from twoends.model.mla import MlaPart, mla_attention
from twoends.model.moe import dense_mlp, mixture
from twoends.model.rows import SequenceRows
from twoends.model.state import MlaState
from twoends.model.weights import Experts, Weights, project


def attention_half(
    weights: Weights,
    residual: Residual,
    sequences: Sequence[SequenceRows],
    *,
    layer: int,
    config: ModelConfig,
    ops: Ops,
) -> None:
    """Steps 1 to 3 of specification 6: mix, snapshot at a block's start, attention added.

    Rows of a `tentative` pass leave the recurrent state as it was and note what would have changed it.
    """
    h_TD = residual.input(weights, "attn_res", ops)
    x_TD = ops.rms_norm(h_TD, weights.vector("input_norm"), config.eps)
    if config.starts_block(layer):
        residual.snapshot()
    if config.is_mla(layer):
        parts = [_mla_part(rows, layer) for rows in sequences]
        residual.add(mla_attention(weights, x_TD, parts, config, ops))
    else:
        residual.add(
            kda_attention(weights, x_TD, [_kda_part(rows, layer) for rows in sequences], config, ops)
        )


def _mla_part(rows: SequenceRows, layer: int) -> MlaPart:
    state = rows.state.layers[layer]
    assert isinstance(state, MlaState)
    # A pass that may be taken back writes the cache too: what is not kept is overwritten.
    start = rows.state.position
    return MlaPart(rows=rows.rows, state=state, start=start, end=start + rows.count)


def _kda_part(rows: SequenceRows, layer: int) -> KdaPart:
    tentative = rows.tentative
    state = rows.state.layers[layer] if tentative is None else tentative.working(layer)
    assert isinstance(state, KdaState)
    note = None if tentative is None else functools.partial(tentative.note, layer)
    return KdaPart(rows=rows.rows, state=state, note=note)


def mixture_half(
    weights: Weights, experts: Experts | None, residual: Residual, *, config: ModelConfig, ops: Ops
) -> None:
    """Steps 4 and 5: mix, then the dense MLP (no experts) or the mixture, added."""
    h_TD = residual.input(weights, "mlp_res", ops)
    x_TD = ops.rms_norm(h_TD, weights.vector("post_attn_norm"), config.eps)
    if experts is None:
        residual.add(dense_mlp(weights, x_TD, config, ops))
    else:
        residual.add(mixture(weights, experts, x_TD, config, ops))


def head_logits(weights: Weights, h_TD: F32, config: ModelConfig, ops: Ops) -> F32:
    """Final norm and head: logits_TW. No cap, no scale."""
    return project(weights, "lm_head", ops.rms_norm(h_TD, weights.vector("final_norm"), config.eps), ops)
