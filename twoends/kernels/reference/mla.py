"""Latent attention in absorbed form: the cache holds L latent and R shared values per token."""

from __future__ import annotations

import numpy as np

from twoends.kernels.ops import F32, Matrix
from twoends.kernels.reference.elementary import exp, sigmoid
from twoends.kernels.reference.fma import fma
from twoends.kernels.reference.lanes import LANES, decode, dot, reduce_lanes


def mla_heads(
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
    """Writes heads first_head .. first_head + num_heads - 1 of `out_THV`; row t sees 0 .. start + t."""
    latent = kv_b.cols
    value_dim = out_THV.shape[2]
    nope_dim = kv_b.rows // num_heads - value_dim
    w_HYL = decode(kv_b).reshape(num_heads, nope_dim + value_dim, latent)
    for t in range(q_THQ.shape[0]):
        seen_CM = cache_CM[: start + t + 1]
        for h in range(num_heads):
            q_Q = q_THQ[t, first_head + h]
            absorbed_L = _weighted_rows(w_HYL[h, :nope_dim], q_Q[:nope_dim])
            query_M = np.concatenate([absorbed_L, q_Q[nope_dim:]])
            context_L = attend(query_M, seen_CM, latent, scale)
            out_THV[t, first_head + h] = dot(w_HYL[h, nope_dim:], context_L)


def attend(query_M: F32, seen_CM: F32, latent: int, scale: float) -> F32:
    """softmax(seen . query * scale) over positions, times the latent part; gives context_L."""
    scores_C = dot(seen_CM, query_M) * np.float32(scale)
    weights_C = exp(scores_C - scores_C.max())
    context_L = _weighted_rows(seen_CM[:, :latent], weights_C)
    return context_L * (np.float32(1) / _sum_by_position(weights_C))


def _weighted_rows(rows_NL: F32, weights_N: F32) -> F32:
    """sum over n ascending of weights[n] * rows[n], one fma each; every column alone."""
    total_L = np.zeros(rows_NL.shape[1], np.float32)
    for row_L, weight in zip(rows_NL, weights_N, strict=True):
        total_L = fma(row_L, weight, total_L)
    return total_L


def _sum_by_position(weights_C: F32) -> np.float32:
    """Position p belongs to lane p mod 16; lanes are summed in order, then reduced."""
    count = weights_C.shape[0]
    padded = np.zeros(-(-count // LANES) * LANES, np.float32)
    padded[:count] = weights_C
    acc = np.zeros(LANES, np.float32)
    for group in padded.reshape(-1, LANES):
        acc = acc + group
    return np.float32(reduce_lanes(acc))


def sigmoid_gate(o_TP: F32, gate_TP: F32) -> F32:
    """o * sigmoid(gate)."""
    return o_TP * sigmoid(gate_TP)
