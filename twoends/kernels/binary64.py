"""The same operations in binary64 with numpy's own sums: an oracle for tests, not a backend.

It shares no arithmetic with `reference`: no lanes, no polynomials, no fma. The model code runs
on it unchanged (weights and state decide the width), and meets the official layer classes to
about 1e-12, so what binary32 rounding does to a model can be told from what a mistake does.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from twoends.kernels.composed import composed
from twoends.kernels.ops import Matrix, Ops
from twoends.kernels.pack_scales import plain_scales
from twoends.kernels.reference.lanes import decode
from twoends.kernels.reference.matmul import E2M1, SCALES
from twoends.kernels.reference.mxfp8 import mxfp8

F64 = NDArray[np.float64]


def binary64_ops() -> Ops:
    """Operations on binary64 arrays. Routing breaks ties as the contract does."""
    typed: dict[str, Any] = {
        "matmul": _matmul,
        "rms_norm": _rms_norm,
        "short_conv": _short_conv,
        "l2_norm": _l2_norm,
        "kda_decay": _kda_decay,
        "sigmoid": _sigmoid,
        "kda_steps": _kda_steps,
        "gated_head_norm": lambda o, w, gate, eps: _rms_norm(o, w, eps) * _sigmoid(gate),
        "mla_heads": _mla_heads,
        "sigmoid_gate": lambda o, gate: o * _sigmoid(gate),
        "attnres_mix": _attnres_mix,
        "route": _route,
        "situ_glu": _situ_glu,
        "silu_glu": lambda gate, up: gate * _sigmoid(gate) * up,
        # Its values are few; there is nothing to compute more exactly.
        "mxfp8": lambda x: mxfp8(x.astype(np.float32)).astype(np.float64),
        "combine": lambda y, weights: np.einsum("tsz,ts->tz", y, weights),
    }
    return composed(backend="binary64", **typed)


def exact_values(matrix: Matrix) -> F64:
    """The weights of any format as binary64, [rows, cols]."""
    if matrix.format != "mxfp4":
        return decode(matrix).astype(np.float64)
    assert matrix.scale is not None
    packed = matrix.data.reshape(matrix.rows, -1)
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(matrix.rows, matrix.cols)
    scale = SCALES[plain_scales(matrix.scale, rows=matrix.rows, groups=matrix.cols // 32)].astype(np.float64)
    return E2M1[codes].astype(np.float64) * np.repeat(scale, 32, axis=1)


def _matmul(matrix: Matrix, x_TX: F64, *, out_TY: F64, first_row: int) -> None:
    out_TY[:, first_row : first_row + matrix.rows] = x_TX @ exact_values(matrix).T


def _rms_norm(x: F64, w: F64, eps: float) -> F64:
    return np.asarray(x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * w)


def _l2_norm(x: F64, scale: float) -> F64:
    return np.asarray(x / np.sqrt((x * x).sum(axis=-1, keepdims=True) + 1e-6) * scale)


def _sigmoid(x: F64) -> F64:
    return np.exp(-np.logaddexp(0, -np.asarray(x, np.float64)))


def _short_conv(u_TP: F64, w_P4: F64, tail_3P: F64) -> F64:
    history = np.concatenate([tail_3P, u_TP])
    num_tokens = len(u_TP)
    acc = sum(w_P4[:, j] * history[j : j + num_tokens] for j in range(w_P4.shape[1]))
    tail_3P[...] = history[num_tokens:]
    return np.asarray(acc * _sigmoid(acc))


def _kda_decay(z: F64, dt_bias_HK: F64, a_log_H: F64, lower_bound: float | None) -> F64:
    s = z + dt_bias_HK
    a = np.exp(a_log_H.astype(np.float64))[:, None]
    g = -a * np.logaddexp(0, s) if lower_bound is None else lower_bound * _sigmoid(a * s)
    return np.asarray(np.exp(g))


def _kda_steps(*, q_THK: F64, k_THK: F64, v_THV: F64, alpha_THK: F64, beta_TH: F64, state_HKV: F64) -> F64:
    o_THV = np.empty_like(v_THV)
    for t in range(len(v_THV)):
        state_HKV *= alpha_THK[t][:, :, None]
        error_HV = v_THV[t] - np.einsum("hkv,hk->hv", state_HKV, k_THK[t])
        state_HKV += np.einsum("hk,hv,h->hkv", k_THK[t], error_HV, beta_TH[t])
        o_THV[t] = np.einsum("hkv,hk->hv", state_HKV, q_THK[t])
    return o_THV


def _mla_heads(
    kv_b: Matrix,
    *,
    q_THQ: F64,
    cache_CM: F64,
    start: int,
    first_head: int,
    num_heads: int,
    scale: float,
    out_THV: F64,
) -> None:
    """Expanded form, unlike the engine's absorbed one: keys and values are made for each position."""
    value_dim, latent = out_THV.shape[2], kv_b.cols
    w_HYL = exact_values(kv_b).reshape(num_heads, -1, latent)
    nope_dim = w_HYL.shape[1] - value_dim
    expanded_CHY = np.einsum("cl,hyl->chy", cache_CM[:, :latent], w_HYL)
    for t in range(len(q_THQ)):
        seen = start + t + 1
        q_HQ = q_THQ[t, first_head : first_head + num_heads]
        scores_HC = np.einsum("hq,chq->hc", q_HQ[:, :nope_dim], expanded_CHY[:seen, :, :nope_dim])
        scores_HC = (scores_HC + q_HQ[:, nope_dim:] @ cache_CM[:seen, latent:].T) * scale
        p_HC = np.exp(scores_HC - scores_HC.max(axis=1, keepdims=True))
        p_HC /= p_HC.sum(axis=1, keepdims=True)
        values_CHV = expanded_CHY[:seen, :, nope_dim:]
        out_THV[t, first_head : first_head + num_heads] = np.einsum("hc,chv->hv", p_HC, values_CHV)


def _attnres_mix(sources_NTD: F64, f_D: F64, eps: float) -> F64:
    inverse_NT = 1 / np.sqrt((sources_NTD**2).mean(axis=-1) + eps)
    scores_NT = (sources_NTD @ f_D) * inverse_NT
    p_NT = np.exp(scores_NT - scores_NT.max(axis=0))
    return np.asarray(np.einsum("nt,ntd->td", p_NT / p_NT.sum(axis=0), sources_NTD))


def _route(
    logits_TE: F64, bias_E: F64, num_chosen: int, renormalize: bool, scaling: float
) -> tuple[NDArray[np.int32], F64]:
    scores_TE = _sigmoid(logits_TE)
    ids_TS = np.argsort(-(scores_TE + bias_E), axis=1, kind="stable")[:, :num_chosen].astype(np.int32)
    weights_TS = np.take_along_axis(scores_TE, ids_TS, axis=1)
    if renormalize:
        weights_TS = weights_TS / (weights_TS.sum(axis=1, keepdims=True) + 1e-20)
    return ids_TS, weights_TS * scaling


def _situ_glu(gate: F64, up: F64, beta: float, linear_beta: float | None) -> F64:
    capped = beta * np.tanh(gate / beta) * _sigmoid(gate)
    return capped * (up if linear_beta is None else linear_beta * np.tanh(up / linear_beta))
