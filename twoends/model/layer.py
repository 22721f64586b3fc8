"""One layer: residual in, attention, residual in, mixture; and the head after the last."""

from __future__ import annotations

import functools

from twoends.checkpoint.config import ModelConfig
from twoends.kernels.ops import F32, KdaState, Ops
from twoends.model.attnres import Residual
from twoends.model.kda import kda_attention
from twoends.model.mla import mla_attention
from twoends.model.moe import dense_mlp, mixture
from twoends.model.state import MlaState, SequenceState
from twoends.model.tentative import Tentative
from twoends.model.weights import Experts, Weights, project


def attention_half(
    weights: Weights,
    residual: Residual,
    state: SequenceState,
    *,
    layer: int,
    config: ModelConfig,
    ops: Ops,
    tentative: Tentative | None = None,
) -> None:
    """Steps 1 to 3 of specification 6: mix, snapshot at a block's start, attention added.

    A `tentative` pass leaves the recurrent state as it was and notes what would have changed it.
    """
    h_TD = residual.input(weights, "attn_res", ops)
    x_TD = ops.rms_norm(h_TD, weights.vector("input_norm"), config.eps)
    if config.starts_block(layer):
        residual.snapshot()
    layer_state = state.layers[layer] if tentative is None else tentative.working(layer)
    match layer_state:
        case MlaState():
            start = state.position
            a_TD = mla_attention(weights, x_TD, layer_state, start=start, config=config, ops=ops)
        case KdaState():
            note = None if tentative is None else functools.partial(tentative.note, layer)
            a_TD = kda_attention(weights, x_TD, layer_state, config, ops, note=note)
    residual.add(a_TD)


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
