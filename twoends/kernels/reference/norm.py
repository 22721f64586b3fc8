"""Norms: squares in binary64, division and square root as IEEE-754 has them."""

from __future__ import annotations

import numpy as np

from twoends.kernels.ops import F32
from twoends.kernels.reference.elementary import sigmoid
from twoends.kernels.reference.lanes import sum_of_squares

# Added to the sum, not to the mean (specification of KDA, 4.3).
L2_EPS = 1e-6


def inverse_rms(x: F32, eps: float) -> F32:
    """1 / sqrt(mean(x^2) + eps) over the last axis, in binary64, rounded once to binary32."""
    mean = sum_of_squares(x) / np.float64(x.shape[-1])
    return (1.0 / np.sqrt(mean + eps)).astype(np.float32)


def rms_norm(x_TD: F32, w_D: F32, eps: float) -> F32:
    """(x * inverse_rms) * w."""
    return (x_TD * inverse_rms(x_TD, eps)[..., None]) * w_D


def l2_norm(x_THK: F32, scale: float) -> F32:
    """(x * inverse) * scale with inverse = 1 / sqrt(sum(x^2) + 1e-6) over the last axis."""
    inverse = (1.0 / np.sqrt(sum_of_squares(x_THK) + L2_EPS)).astype(np.float32)
    return (x_THK * inverse[..., None]) * np.float32(scale)


def gated_head_norm(o_THV: F32, w_V: F32, gate_THV: F32, eps: float) -> F32:
    """rms_norm over each head's V, then times sigmoid(gate)."""
    return rms_norm(o_THV, w_V, eps) * sigmoid(gate_THV)
