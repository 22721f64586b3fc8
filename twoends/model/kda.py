"""Kimi Delta Attention: projections, convolution, decay, recurrence, gated norm (K3 report 2.1)."""

from __future__ import annotations

from collections.abc import Callable

from twoends.checkpoint.config import ModelConfig
from twoends.kernels.ops import F32, KdaInputs, KdaState, Ops
from twoends.model.tentative import KdaRows
from twoends.model.weights import Weights, kda_inputs, project, project_all


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
    q_TP, k_TP, v_TP, f_TR, beta_TH, gate_TG = project_all(weights, kda_inputs(config), x_TD, ops)
    decay_TP = project(weights, "f_b_proj", f_TR, ops)
    gate_TP = gate_TG if config.full_rank_gate else project(weights, "g_b_proj", gate_TG, ops)
    mixed = ops.kda_mix(
        KdaInputs(
            q_TP=q_TP,
            k_TP=k_TP,
            v_TP=v_TP,
            decay_THK=decay_TP.reshape(heads),
            beta_TH=beta_TH,
            gate_THV=gate_TP.reshape(heads),
            q_conv_P4=weights.vector("q_conv"),
            k_conv_P4=weights.vector("k_conv"),
            v_conv_P4=weights.vector("v_conv"),
            dt_bias_HK=weights.vector("dt_bias").reshape(heads[1:]),
            # A_log is per head; the file may pad it to the head dimension with zeros that no head owns.
            a_log_H=weights.vector("a_log")[: config.kda_num_heads],
            o_norm_V=weights.vector("o_norm"),
            lower_bound=config.gate_lower_bound,
            eps=config.eps,
        ),
        state,
    )
    if note is not None:
        note(KdaRows(q_TP=q_TP, k_TP=k_TP, v_TP=v_TP, mixed=mixed))
    return project(weights, "o_proj", mixed.y_THV.reshape(num_tokens, -1), ops)
