"""Mixture of experts in a latent space, and the dense layer (K3 report 2.3)."""

from __future__ import annotations

import numpy as np

from twoends.checkpoint.config import ModelConfig
from twoends.kernels.ops import F32, I32, Ops
from twoends.model.weights import Experts, ExpertWeights, Weights, project


def dense_mlp(weights: Weights, x_TD: F32, config: ModelConfig, ops: Ops) -> F32:
    """down(glu(gate x, up x))."""
    return _gated_mlp(weights, ("gate_proj", "up_proj", "down_proj"), x_TD, config, ops)


def mixture(weights: Weights, experts: Experts, x_TD: F32, config: ModelConfig, ops: Ops) -> F32:
    """Routed experts in the latent width, plus the shared experts: m_TD.

    The router reads the full width, before the latent projection. Experts are asked for as soon
    as they are known, so their reads go on under the latent projection and the shared experts.
    """
    logits_TE = project(weights, "router", x_TD, ops)
    ids_TS, weights_TS = ops.route(
        logits_TE,
        weights.vector("router_bias"),
        config.experts_per_token,
        config.renormalize,
        config.routed_scaling,
    )
    experts.request(ids_TS)
    z_TZ = x_TD if config.latent_width is None else project(weights, "latent_down", x_TD, ops)
    shared_TD = None
    if config.num_shared_experts:
        names = ("shared_gate", "shared_up", "shared_down")
        shared_TD = _gated_mlp(weights, names, x_TD, config, ops)
    routed_TD = ops.combine(_expert_outputs(experts, z_TZ, ids_TS, config, ops), weights_TS)
    if config.latent_width is not None:
        # The norm is of the sum, not of each expert (specification 7.3).
        normed_TZ = ops.rms_norm(routed_TD, weights.vector("latent_norm"), config.eps)
        routed_TD = project(weights, "latent_up", normed_TZ, ops)
    return routed_TD if shared_TD is None else routed_TD + shared_TD


def _expert_outputs(experts: Experts, z_TZ: F32, ids_TS: I32, config: ModelConfig, ops: Ops) -> F32:
    """y_TSZ by rank; kept apart because experts arrive in any order and the sum has one."""
    y_TSZ = np.empty((*ids_TS.shape, z_TZ.shape[1]), z_TZ.dtype)
    for expert_id, expert in experts.arrivals():
        rows, ranks = np.nonzero(ids_TS == expert_id)
        y_TSZ[rows, ranks] = _expert_mlp(expert, z_TZ[rows], config, ops)
    return y_TSZ


def _expert_mlp(expert: ExpertWeights, z_TZ: F32, config: ModelConfig, ops: Ops) -> F32:
    num_rows = z_TZ.shape[0]
    gate_TF = np.empty((num_rows, expert.w1.rows), z_TZ.dtype)
    up_TF = np.empty_like(gate_TF)
    y_TZ = np.empty_like(z_TZ)
    ops.matmul(expert.w1, z_TZ, out_TY=gate_TF, first_row=0)
    ops.matmul(expert.w3, z_TZ, out_TY=up_TF, first_row=0)
    ops.matmul(expert.w2, _glu(gate_TF, up_TF, config, ops), out_TY=y_TZ, first_row=0)
    return y_TZ


def _gated_mlp(
    weights: Weights, names: tuple[str, str, str], x_TD: F32, config: ModelConfig, ops: Ops
) -> F32:
    gate, up, down = names
    gate_TF = project(weights, gate, x_TD, ops)
    up_TF = project(weights, up, x_TD, ops)
    return project(weights, down, _glu(gate_TF, up_TF, config, ops), ops)


def _glu(gate_TF: F32, up_TF: F32, config: ModelConfig, ops: Ops) -> F32:
    if config.activation == "situ":
        return ops.situ_glu(gate_TF, up_TF, config.situ_beta, config.situ_linear_beta)
    return ops.silu_glu(gate_TF, up_TF)
