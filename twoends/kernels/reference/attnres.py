"""Attention over depth: keys are normalised, values are raw (K3 report 2.2)."""

from __future__ import annotations

import numpy as np

from twoends.kernels.ops import F32
from twoends.kernels.reference.elementary import exp
from twoends.kernels.reference.fma import fma
from twoends.kernels.reference.lanes import dot
from twoends.kernels.reference.norm import inverse_rms


def attnres_mix(sources_NTD: F32, f_D: F32, eps: float) -> F32:
    """softmax over sources of dot(f, source) * inverse_rms(source), times the raw sources.

    `f_D` is norm weight * projection, whose product of two bf16 numbers is exact. The sum of the
    exponentials and the weighted sum run over sources in order.
    """
    scores_NT = dot(f_D, sources_NTD) * inverse_rms(sources_NTD, eps)
    e_NT = exp(scores_NT - scores_NT.max(axis=0))
    total_T = np.zeros_like(e_NT[0])
    for e_T in e_NT:
        total_T = total_T + e_T
    h_TD = np.zeros_like(sources_NTD[0])
    for source_TD, e_T in zip(sources_NTD, e_NT, strict=True):
        h_TD = fma(source_TD, (e_T / total_T)[:, None], h_TD)
    return np.asarray(h_TD, dtype=np.float32)
