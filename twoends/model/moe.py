"""Mixture of experts in a latent space, and the dense layer (K3 report 2.3)."""

from __future__ import annotations

import numpy as np

from twoends.checkpoint.config import ModelConfig
from twoends.kernels.composed import gated
from twoends.kernels.ops import F32, Glu, Ops
from twoends.model.weights import Experts, Weights, project, project_all


def dense_mlp(weights: Weights, x_TD: F32, config: ModelConfig, ops: Ops) -> F32:
    """down(glu(gate x, up x))."""
    gate_TF, up_TF = project_all(weights, ("gate_proj", "up_proj"), x_TD, ops)
    return project(weights, "down_proj", gated(ops, gate_TF, up_TF, _glu(config)), ops)


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
    z_TZ, shared_TD = _latent_and_shared(weights, x_TD, config, ops)
    # By rank, and kept apart: experts arrive in any order and the sum has one.
    y_TSZ = np.empty((*ids_TS.shape, z_TZ.shape[1]), z_TZ.dtype)
    for group in experts.arrivals():
        ops.expert_mlps(
            group, z_TZ, ids_TS, _glu(config), activations=config.expert_activations, out_TSZ=y_TSZ
        )
    routed_TD = ops.combine(y_TSZ, weights_TS)
    if config.latent_width is not None:
        # The norm is of the sum, not of each expert (specification 7.3).
        normed_TZ = ops.rms_norm(routed_TD, weights.vector("latent_norm"), config.eps)
        routed_TD = project(weights, "latent_up", normed_TZ, ops)
    return routed_TD if shared_TD is None else routed_TD + shared_TD


def _latent_and_shared(weights: Weights, x_TD: F32, config: ModelConfig, ops: Ops) -> tuple[F32, F32 | None]:
    """What the routed experts read, and what the shared experts give (None without them)."""
    latent = () if config.latent_width is None else ("latent_down",)
    shared = ("shared_gate", "shared_up") if config.num_shared_experts else ()
    outs = project_all(weights, (*latent, *shared), x_TD, ops)
    z_TZ = outs[0] if latent else x_TD
    if not shared:
        return z_TZ, None
    gate_TF, up_TF = outs[-2:]
    return z_TZ, project(weights, "shared_down", gated(ops, gate_TF, up_TF, _glu(config)), ops)


def _glu(config: ModelConfig) -> Glu:
    if config.activation == "situ":
        return Glu(beta=config.situ_beta, linear_beta=config.situ_linear_beta)
    return Glu(beta=None, linear_beta=None)
