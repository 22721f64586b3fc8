"""Kimi Delta Attention: convolution, decay and the recurrence, token by token."""

from __future__ import annotations

import numpy as np

from twoends.kernels.ops import F32
from twoends.kernels.reference.elementary import exp, sigmoid, silu, softplus
from twoends.kernels.reference.fma import fma


def short_conv(u_TP: F32, w_P4: F32, tail_3P: F32) -> F32:
    """Depthwise causal convolution with SiLU; `tail_3P` (oldest first) is replaced by the newest inputs.

    acc = w0 * oldest, then one fma per newer tap; the last weight meets the current token.
    """
    width = w_P4.shape[1]
    history = np.concatenate([tail_3P, u_TP])
    y_TP = np.empty_like(u_TP)
    for t in range(u_TP.shape[0]):
        acc = w_P4[:, 0] * history[t]
        for j in range(1, width):
            acc = fma(w_P4[:, j], history[t + j], acc)
        y_TP[t] = silu(acc)
    tail_3P[...] = history[u_TP.shape[0] :]
    return y_TP


def kda_decay(z_THK: F32, dt_bias_HK: F32, a_log_H: F32, lower_bound: float | None) -> F32:
    """alpha = exp(g). With a bound g = bound * sigmoid(e^A (z + dt)), else g = -(e^A softplus(z + dt)).

    A is per head even where the file pads it to the head dimension (specification, pitfall 1).
    """
    s = z_THK + dt_bias_HK
    a = exp(a_log_H)[:, None]
    g = -(a * softplus(s)) if lower_bound is None else np.float32(lower_bound) * sigmoid(a * s)
    return exp(g)


def kda_steps(*, q_THK: F32, k_THK: F32, v_THV: F32, alpha_THK: F32, beta_TH: F32, state_HKV: F32) -> F32:
    """Decay, predict, correct, read; k ascending, every v alone. `q_THK` is already scaled."""
    num_tokens, num_heads, key_dim = k_THK.shape
    o_THV = np.empty_like(v_THV)
    for t in range(num_tokens):
        q, k = q_THK[t], k_THK[t]
        state_HKV *= alpha_THK[t, :, :, None]
        predicted = np.zeros((num_heads, state_HKV.shape[2]), np.float32)
        for i in range(key_dim):
            predicted = fma(state_HKV[:, i], k[:, i, None], predicted)
        delta_HV = beta_TH[t, :, None] * (v_THV[t] - predicted)
        out = np.zeros_like(predicted)
        for i in range(key_dim):
            state_HKV[:, i] = fma(k[:, i, None], delta_HV, state_HKV[:, i])
            out = fma(state_HKV[:, i], q[:, i, None], out)
        o_THV[t] = out
    return o_THV
