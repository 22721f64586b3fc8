"""Router, gated units and the combination of experts."""

from __future__ import annotations

import numpy as np

from twoends.errors import NotSound
from twoends.kernels.ops import F32, I32
from twoends.kernels.reference.elementary import sigmoid, silu, tanh
from twoends.kernels.reference.fma import fma

# Added to the sum of the chosen scores (specification 7.2).
WEIGHT_EPS = np.float32(1e-20)


def route(logits_TE: F32, bias_E: F32, num_chosen: int, renormalize: bool, scaling: float) -> tuple[I32, F32]:
    """Top experts by sigmoid(logit) + bias, best first, lowest id on ties; weights without the bias.

    Raises NotSound when a score is not a number: a choice among those would be arbitrary.
    """
    scores_TE = sigmoid(logits_TE)
    biased_TE = scores_TE + bias_E
    if not np.isfinite(biased_TE).all():
        row = int(np.argmin(np.isfinite(biased_TE).all(axis=1)))
        raise not_finite_scores(row)
    ids_TS = np.argsort(-biased_TE, axis=1, kind="stable")[:, :num_chosen].astype(np.int32)
    weights_TS = np.take_along_axis(scores_TE, ids_TS, axis=1)
    if renormalize:
        total_T = np.zeros_like(weights_TS[:, 0])
        for s in range(num_chosen):
            total_T = total_T + weights_TS[:, s]
        weights_TS = weights_TS / (total_T + WEIGHT_EPS)[:, None]
    return ids_TS, weights_TS * np.float32(scaling)


def not_finite_scores(row: int) -> NotSound:
    """The error of both backends for router scores that are not numbers."""
    return NotSound(
        f"the router's scores of row {row} are not finite, so no choice of experts would be right.",
        remedies=["The weights or the state hold NaN or infinity; check the files:  twoends inspect MODEL"],
    )


def situ_glu(gate_TF: F32, up_TF: F32, beta: float, linear_beta: float | None) -> F32:
    """beta tanh(gate / beta) * sigmoid(gate) * (linear_beta tanh(up / linear_beta), or up).

    The sigmoid takes the uncapped gate (specification 7.1).
    """
    cap = np.float32(beta)
    capped = (cap * tanh(gate_TF / cap)) * sigmoid(gate_TF)
    if linear_beta is None:
        return capped * up_TF
    linear_cap = np.float32(linear_beta)
    return capped * (linear_cap * tanh(up_TF / linear_cap))


def silu_glu(gate_TF: F32, up_TF: F32) -> F32:
    """silu(gate) * up."""
    return silu(gate_TF) * up_TF


def combine(y_TSZ: F32, weights_TS: F32) -> F32:
    """sum over ranks s ascending of weights[s] * y[s], one fma each."""
    z_TZ = np.zeros((y_TSZ.shape[0], y_TSZ.shape[2]), np.float32)
    for s in range(y_TSZ.shape[1]):
        z_TZ = fma(y_TSZ[:, s], weights_TS[:, s, None], z_TZ)
    return z_TZ
