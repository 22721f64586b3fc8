"""The C++ backend as an `Ops` record: equal to the reference bit for bit, on any instruction set."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
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
from twoends.kernels.reference.moe import not_finite_scores

# Bumped with every change of what native/bind*.cpp take, so that an old build is never called in the new way.
INTERFACE = 6


def native_ops(isa: str, threads: int) -> Ops:
    """The native backend on one instruction set with a thread pool of its own.

    Raises ImportError when the module was not built and ValueError for a set that this machine lacks;
    `choose` turns both into something a user can act on. Arrays must be float32 and C-contiguous: the
    module refuses anything else (TypeError) rather than convert it.
    """
    module = importlib.import_module("twoends.kernels._native")
    return ops_of(module.Kernels(isa, threads))


def ops_of(kernels: Any) -> Ops:
    """The record over one `_native.Kernels`."""
    native = _NativeOps(kernels)
    return Ops(
        backend=f"native {kernels.isa}",
        matmul=native.matmul,
        rms_norm=native.rms_norm,
        short_conv=native.short_conv,
        l2_norm=native.l2_norm,
        kda_decay=native.kda_decay,
        sigmoid=native.sigmoid,
        kda_steps=native.kda_steps,
        gated_head_norm=native.gated_head_norm,
        mla_heads=native.mla_heads,
        sigmoid_gate=native.sigmoid_gate,
        attnres_mix=native.attnres_mix,
        route=native.route,
        situ_glu=native.situ_glu,
        silu_glu=native.silu_glu,
        mxfp8=native.mxfp8,
        combine=native.combine,
        products=native.products,
        kda_mix=native.kda_mix,
        expert_mlps=native.expert_mlps,
    )


class _NativeOps:
    """Allocates the outputs; shapes are checked in C++ (native/bind.cpp)."""

    __slots__ = ("_kernels",)

    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels

    def matmul(self, matrix: Matrix, x_TX: F32, *, out_TY: F32, first_row: int) -> None:
        self._kernels.matmul(
            matrix.format, matrix.data, matrix.scale, matrix.rows, matrix.cols, x_TX, out_TY, first_row
        )

    def rms_norm(self, x_TD: F32, w_D: F32, eps: float) -> F32:
        out_TD = np.empty_like(x_TD)
        self._kernels.rms_norm(x_TD, w_D, eps, out_TD)
        return out_TD

    def short_conv(self, u_TP: F32, w_P4: F32, tail_3P: F32) -> F32:
        out_TP = np.empty_like(u_TP)
        self._kernels.short_conv(u_TP, w_P4, tail_3P, out_TP)
        return out_TP

    def l2_norm(self, x_THK: F32, scale: float) -> F32:
        out_THK = np.empty_like(x_THK)
        self._kernels.l2_norm(x_THK, scale, out_THK)
        return out_THK

    def kda_decay(self, z_THK: F32, dt_bias_HK: F32, a_log_H: F32, lower_bound: float | None) -> F32:
        out_THK = np.empty_like(z_THK)
        self._kernels.kda_decay(z_THK, dt_bias_HK, a_log_H, lower_bound, out_THK)
        return out_THK

    def sigmoid(self, x: F32) -> F32:
        out = np.empty_like(x)
        self._kernels.sigmoid(x, out)
        return out

    def kda_steps(
        self, *, q_THK: F32, k_THK: F32, v_THV: F32, alpha_THK: F32, beta_TH: F32, state_HKV: F32
    ) -> F32:
        out_THV = np.empty_like(v_THV)
        self._kernels.kda_steps(q_THK, k_THK, v_THV, alpha_THK, beta_TH, state_HKV, out_THV)
        return out_THV

    def gated_head_norm(self, o_THV: F32, w_V: F32, gate_THV: F32, eps: float) -> F32:
        out_THV = np.empty_like(o_THV)
        self._kernels.gated_head_norm(o_THV, w_V, gate_THV, eps, out_THV)
        return out_THV

    def mla_heads(
        self,
        kv_b: Matrix,
        *,
        q_THQ: F32,
        cache_CM: F32,
        start: int,
        first_head: int,
        num_heads: int,
        scale: float,
        out_THV: F32,
    ) -> None:
        assert kv_b.scale is None, "the up-projection of the latent is bf16 or f32"
        self._kernels.mla_heads(
            kv_b.format,
            kv_b.data,
            kv_b.rows,
            kv_b.cols,
            q_THQ,
            cache_CM,
            start,
            first_head,
            num_heads,
            scale,
            out_THV,
        )

    def sigmoid_gate(self, o_TP: F32, gate_TP: F32) -> F32:
        out_TP = np.empty_like(o_TP)
        self._kernels.sigmoid_gate(o_TP, gate_TP, out_TP)
        return out_TP

    def attnres_mix(self, sources_NTD: F32, f_D: F32, eps: float) -> F32:
        out_TD = np.empty(sources_NTD.shape[1:], np.float32)
        self._kernels.attnres_mix(sources_NTD, f_D, eps, out_TD)
        return out_TD

    def route(
        self, logits_TE: F32, bias_E: F32, num_chosen: int, renormalize: bool, scaling: float
    ) -> tuple[I32, F32]:
        ids_TS = np.empty((logits_TE.shape[0], num_chosen), np.int32)
        weights_TS = np.empty(ids_TS.shape, np.float32)
        bad_row = self._kernels.route(logits_TE, bias_E, renormalize, scaling, ids_TS, weights_TS)
        if bad_row >= 0:
            raise not_finite_scores(bad_row)
        return ids_TS, weights_TS

    def situ_glu(self, gate_TF: F32, up_TF: F32, beta: float, linear_beta: float | None) -> F32:
        out_TF = np.empty_like(gate_TF)
        self._kernels.situ_glu(gate_TF, up_TF, beta, linear_beta, out_TF)
        return out_TF

    def silu_glu(self, gate_TF: F32, up_TF: F32) -> F32:
        out_TF = np.empty_like(gate_TF)
        self._kernels.silu_glu(gate_TF, up_TF, out_TF)
        return out_TF

    def combine(self, y_TSZ: F32, weights_TS: F32) -> F32:
        out_TZ = np.empty((y_TSZ.shape[0], y_TSZ.shape[2]), np.float32)
        self._kernels.combine(y_TSZ, weights_TS, out_TZ)
        return out_TZ

    def products(self, x_TX: F32, parts: Sequence[tuple[Matrix, F32, int]]) -> None:
        self._kernels.products(x_TX, parts)

    def expert_mlps(
        self,
        experts: Sequence[tuple[int, ExpertWeights]],
        z_TZ: F32,
        ids_TS: I32,
        glu: Glu,
        *,
        activations: Activations = "f32",
        out_TSZ: F32,
    ) -> None:
        to_mxfp8 = activations == "mxfp8"
        self._kernels.experts(experts, z_TZ, ids_TS, glu.beta, glu.linear_beta, to_mxfp8, out_TSZ)

    def mxfp8(self, x: F32) -> F32:
        out = np.empty_like(x)
        self._kernels.mxfp8(x, out)
        return out

    def kda_mix(self, inputs: KdaInputs, state: KdaState) -> KdaOutput:
        out = KdaOutput(
            y_THV=np.empty_like(inputs.gate_THV),
            k_THK=np.empty_like(inputs.decay_THK),
            v_THV=np.empty_like(inputs.gate_THV),
            alpha_THK=np.empty_like(inputs.decay_THK),
            beta_TH=np.empty_like(inputs.beta_TH),
        )
        self._kernels.kda_mix(
            inputs.q_TP,
            inputs.k_TP,
            inputs.v_TP,
            inputs.decay_THK,
            inputs.beta_TH,
            inputs.gate_THV,
            inputs.q_conv_P4,
            inputs.k_conv_P4,
            inputs.v_conv_P4,
            inputs.dt_bias_HK,
            inputs.a_log_H,
            inputs.o_norm_V,
            inputs.lower_bound,
            inputs.eps,
            state.state_HKV,
            state.q_tail_3P,
            state.k_tail_3P,
            state.v_tail_3P,
            out.y_THV,
            out.k_THK,
            out.v_THV,
            out.alpha_THK,
            out.beta_TH,
        )
        return out
