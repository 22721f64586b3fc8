"""Kimi Delta Attention: projections, convolution, decay, recurrence, gated norm (K3 report 2.1)."""

from __future__ import annotations

from collections.abc import Callable

from twoends.checkpoint.config import ModelConfig
from twoends.kernels.ops import F32, Ops
from twoends.model.state import KdaState
from twoends.model.tentative import KdaRows
from twoends.model.weights import Weights, project


def kda_attention(
    weights: Weights,
    x_TD: F32,
    state: KdaState,
    config: ModelConfig,
    ops: Ops,
    *,
    note: Callable[[KdaRows], None] | None = None,
) -> F32:
    """The mixer of a KDA layer on normalised input: a_TD. Changes `state`.

    Used for prefill and decode alike: the plain recurrence, so a chunk border can't change a bit.
    `note` is told what the recurrence read, for passes that may be taken back.
    """
    num_tokens = x_TD.shape[0]
    heads = (num_tokens, config.kda_num_heads, config.kda_head_dim)

    def convolved(u_TP: F32, conv: str, tail_3P: F32) -> F32:
        return ops.short_conv(u_TP, weights.vector(conv), tail_3P).reshape(heads)

    q_TP = project(weights, "q_proj", x_TD, ops)
    q_THK = ops.l2_norm(convolved(q_TP, "q_conv", state.q_tail_3P), config.kda_head_dim**-0.5)
    k_TP = project(weights, "k_proj", x_TD, ops)
    k_THK = ops.l2_norm(convolved(k_TP, "k_conv", state.k_tail_3P), 1.0)
    v_TP = project(weights, "v_proj", x_TD, ops)
    v_THV = convolved(v_TP, "v_conv", state.v_tail_3P)

    z_THK = project(weights, "f_b_proj", project(weights, "f_a_proj", x_TD, ops), ops).reshape(heads)
    dt_bias_HK = weights.vector("dt_bias").reshape(heads[1:])
    # A_log is per head; the file may pad it to the head dimension with zeros that no head owns.
    a_log_H = weights.vector("a_log")[: config.kda_num_heads]
    alpha_THK = ops.kda_decay(z_THK, dt_bias_HK, a_log_H, config.gate_lower_bound)
    beta_TH = ops.sigmoid(project(weights, "b_proj", x_TD, ops))

    if note is not None:
        note(
            KdaRows(
                q_TP=q_TP,
                k_TP=k_TP,
                v_TP=v_TP,
                key_THK=k_THK,
                value_THV=v_THV,
                alpha_THK=alpha_THK,
                beta_TH=beta_TH,
            )
        )
    o_THV = ops.kda_steps(
        q_THK=q_THK, k_THK=k_THK, v_THV=v_THV, alpha_THK=alpha_THK, beta_TH=beta_TH, state_HKV=state.state_HKV
    )
    gate_THV = _output_gate(weights, x_TD, config, ops).reshape(heads)
    y_THV = ops.gated_head_norm(o_THV, weights.vector("o_norm"), gate_THV, config.eps)
    return project(weights, "o_proj", y_THV.reshape(num_tokens, -1), ops)


def _output_gate(weights: Weights, x_TD: F32, config: ModelConfig, ops: Ops) -> F32:
    if config.full_rank_gate:
        return project(weights, "g_proj", x_TD, ops)
    return project(weights, "g_b_proj", project(weights, "g_a_proj", x_TD, ops), ops)
