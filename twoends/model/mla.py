"""Gated latent attention without positions, in absorbed form (specification 5)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from twoends.checkpoint.config import ModelConfig
from twoends.kernels.ops import F32, Ops
from twoends.model.state import MlaState
from twoends.model.weights import Weights, mla_inputs, project, project_all


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaPart:
    """The rows of one sequence in a pass, its state in this layer, the cache's length before and after."""

    rows: slice
    state: MlaState
    start: int
    end: int


def mla_attention(
    weights: Weights, x_TD: F32, parts: Sequence[MlaPart], config: ModelConfig, ops: Ops
) -> F32:
    """The mixer of an MLA layer on normalised input: a_TD. A part writes its cache rows start .. end - 1."""
    num_tokens, latent = x_TD.shape[0], config.kv_lora_rank
    query_dim = config.nope_dim + config.rope_dim
    q_TR, kv_TM, *gates = project_all(weights, mla_inputs(config), x_TD, ops)
    q_THQ = _query(weights, q_TR, config, ops).reshape(num_tokens, config.num_heads, query_dim)

    # The norm covers the latent part only, never the shared key (specification 5.1).
    latent_TL = ops.rms_norm(
        np.ascontiguousarray(kv_TM[:, :latent]), weights.vector("kv_a_norm"), config.latent_eps
    )
    for part in parts:
        cache_TM = part.state.cache_CM[part.start : part.end]
        cache_TM[:, :latent] = latent_TL[part.rows]
        cache_TM[:, latent:] = kv_TM[part.rows, latent:]

    o_THV = np.empty((num_tokens, config.num_heads, config.value_dim), x_TD.dtype)
    head_rows = config.nope_dim + config.value_dim
    for group in weights.panels(("kv_b_proj",)):
        for (_, first_row, panel), part in itertools.product(group, parts):
            ops.mla_heads(
                panel,
                q_THQ=q_THQ[part.rows],
                cache_CM=part.state.cache_CM[: part.end],
                start=part.start,
                first_head=first_row // head_rows,
                num_heads=panel.rows // head_rows,
                scale=query_dim**-0.5,
                out_THV=o_THV[part.rows],
            )
    o_TP = o_THV.reshape(num_tokens, -1)
    if config.mla_output_gate:
        o_TP = ops.sigmoid_gate(o_TP, gates[0])
    return project(weights, "o_proj", o_TP, ops)


def _query(weights: Weights, q_TR: F32, config: ModelConfig, ops: Ops) -> F32:
    if config.q_lora_rank is None:
        return q_TR
    normed_TR = ops.rms_norm(q_TR, weights.vector("q_a_norm"), config.latent_eps)
    return project(weights, "q_b_proj", normed_TR, ops)
