"""The larger operations as compositions of the smaller ones: their definition, for every backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from twoends.kernels.ops import (
    F32,
    I32,
    Activations,
    ExpertWeights,
    Glu,
    KdaInputs,
    KdaOutput,
    KdaState,
    Matrix,
    Ops,
)


def composed(**small: Any) -> Ops:
    """An `Ops` record whose larger operations call its smaller ones, which are given by name."""

    # The closures see the finished record: they are called long after it exists.
    def products(x_TX: F32, parts: Sequence[tuple[Matrix, F32, int]]) -> None:
        for matrix, out_TY, first_row in parts:
            ops.matmul(matrix, x_TX, out_TY=out_TY, first_row=first_row)

    def kda_mix(inputs: KdaInputs, state: KdaState) -> KdaOutput:
        return _kda_mix(ops, inputs, state)

    def expert_mlps(
        experts: Sequence[tuple[int, ExpertWeights]],
        z_TZ: F32,
        ids_TS: I32,
        glu: Glu,
        *,
        activations: Activations = "f32",
        out_TSZ: F32,
    ) -> None:
        rounded = ops.mxfp8 if activations == "mxfp8" else _as_is
        for expert_id, weights in experts:
            rows, ranks = np.nonzero(ids_TS == expert_id)
            out_TSZ[rows, ranks] = _expert_mlp(ops, weights, z_TZ[rows], glu, rounded)

    ops = Ops(**small, products=products, kda_mix=kda_mix, expert_mlps=expert_mlps)
    return ops


def gated(ops: Ops, gate_TF: F32, up_TF: F32, glu: Glu) -> F32:
    """The unit that `glu` names."""
    if glu.beta is None:
        return ops.silu_glu(gate_TF, up_TF)
    return ops.situ_glu(gate_TF, up_TF, glu.beta, glu.linear_beta)


def _kda_mix(ops: Ops, inputs: KdaInputs, state: KdaState) -> KdaOutput:
    heads = inputs.decay_THK.shape
    key_dim = heads[2]
    q_TP = ops.short_conv(inputs.q_TP, inputs.q_conv_P4, state.q_tail_3P)
    k_TP = ops.short_conv(inputs.k_TP, inputs.k_conv_P4, state.k_tail_3P)
    v_THV = ops.short_conv(inputs.v_TP, inputs.v_conv_P4, state.v_tail_3P).reshape(inputs.gate_THV.shape)
    q_THK = ops.l2_norm(q_TP.reshape(heads), key_dim**-0.5)
    k_THK = ops.l2_norm(k_TP.reshape(heads), 1.0)
    alpha_THK = ops.kda_decay(inputs.decay_THK, inputs.dt_bias_HK, inputs.a_log_H, inputs.lower_bound)
    beta_TH = ops.sigmoid(inputs.beta_TH)
    o_THV = ops.kda_steps(
        q_THK=q_THK, k_THK=k_THK, v_THV=v_THV, alpha_THK=alpha_THK, beta_TH=beta_TH, state_HKV=state.state_HKV
    )
    y_THV = ops.gated_head_norm(o_THV, inputs.o_norm_V, inputs.gate_THV, inputs.eps)
    return KdaOutput(y_THV=y_THV, k_THK=k_THK, v_THV=v_THV, alpha_THK=alpha_THK, beta_TH=beta_TH)


def _as_is(x: F32) -> F32:
    return x


def _expert_mlp(ops: Ops, weights: ExpertWeights, z_NZ: F32, glu: Glu, rounded: Callable[[F32], F32]) -> F32:
    z_NZ = rounded(z_NZ)
    gate_NF = np.empty((z_NZ.shape[0], weights.w1.rows), z_NZ.dtype)
    up_NF = np.empty_like(gate_NF)
    y_NZ = np.empty((z_NZ.shape[0], weights.w2.rows), z_NZ.dtype)
    ops.matmul(weights.w1, z_NZ, out_TY=gate_NF, first_row=0)
    ops.matmul(weights.w3, z_NZ, out_TY=up_NF, first_row=0)
    ops.matmul(weights.w2, rounded(gated(ops, gate_NF, up_NF, glu)), out_TY=y_NZ, first_row=0)
    return y_NZ
