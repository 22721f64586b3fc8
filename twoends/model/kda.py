"""Kimi Delta Attention: projections, convolution, decay, recurrence, gated norm (K3 report 2.1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from twoends.checkpoint.config import ModelConfig
from twoends.kernels.ops import F32, KdaInputs, KdaState, Ops
from twoends.model.tentative import KdaRows
from twoends.model.weights import Weights, kda_inputs, project, project_all


@dataclass(frozen=True, slots=True, kw_only=True)
class KdaPart:
    """The rows of one sequence in a pass, and its state in this layer, which changes.

    `note` is told what the recurrence read, for passes that may be taken back.
    """

    rows: slice
    state: KdaState
    note: Callable[[KdaRows], None] | None


def kda_attention(
    weights: Weights, x_TD: F32, parts: Sequence[KdaPart], config: ModelConfig, ops: Ops
) -> F32:
    """The mixer of a KDA layer on normalised input: a_TD. Changes the states of `parts`, who share the rows.

    Used for prefill and decode alike: the plain recurrence, so a chunk border can't change a bit.
    """
    num_tokens = x_TD.shape[0]
    heads = (num_tokens, config.kda_num_heads, config.kda_head_dim)
    q_TP, k_TP, v_TP, f_TR, beta_TH, gate_TG = project_all(weights, kda_inputs(config), x_TD, ops)
    decay_TP = project(weights, "f_b_proj", f_TR, ops)
    gate_TP = gate_TG if config.full_rank_gate else project(weights, "g_b_proj", gate_TG, ops)
    inputs = KdaInputs(
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
    )
    y_THV = _mix_each(inputs, parts, ops)
    return project(weights, "o_proj", y_THV.reshape(num_tokens, -1), ops)


def _mix_each(inputs: KdaInputs, parts: Sequence[KdaPart], ops: Ops) -> F32:
    """What carries a sequence, for one after the other: y_THV of all rows."""
    if len(parts) == 1:
        return _mix(inputs, parts[0], ops)
    y_THV = np.empty_like(inputs.gate_THV)
    for part in parts:
        y_THV[part.rows] = _mix(_rows_of(inputs, part.rows), part, ops)
    return y_THV


def _mix(inputs: KdaInputs, part: KdaPart, ops: Ops) -> F32:
    mixed = ops.kda_mix(inputs, part.state)
    if part.note is not None:
        part.note(KdaRows(q_TP=inputs.q_TP, k_TP=inputs.k_TP, v_TP=inputs.v_TP, mixed=mixed))
    return mixed.y_THV


def _rows_of(inputs: KdaInputs, rows: slice) -> KdaInputs:
    return replace(
        inputs,
        q_TP=inputs.q_TP[rows],
        k_TP=inputs.k_TP[rows],
        v_TP=inputs.v_TP[rows],
        decay_THK=inputs.decay_THK[rows],
        beta_TH=inputs.beta_TH[rows],
        gate_THV=inputs.gate_THV[rows],
    )
