"""What the mathematics needs to know of weights: small vectors by name, matrices panel by panel.

A panel is a run of whole rows of one matrix. Layers ask for their weights in the order of
`layer_order`, so that a store may read ahead of them; each matrix is asked for once a pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from twoends.checkpoint.config import ModelConfig
from twoends.kernels.ops import F32, I32, Matrix, Ops

VECTORS = "vectors"


class Weights(Protocol):
    """The trunk weights of one layer, or of the top (norm and head)."""

    def vector(self, name: str) -> F32:
        """A small tensor in binary32, in the shape of the checkpoint without its unit axes."""

    def rows(self, name: str) -> int:
        """Number of rows of a whole matrix."""

    def panels(self, name: str) -> Iterator[tuple[int, Matrix]]:
        """(first row, rows as a Matrix) from the first row to the last; a panel is valid until the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertWeights:
    """One routed expert: w2(glu(w1 z, w3 z))."""

    w1: Matrix
    w2: Matrix
    w3: Matrix


class Experts(Protocol):
    """The routed experts of one layer, for one pass."""

    def request(self, ids_TS: I32) -> None:
        """Says which experts will be needed; reading may begin."""

    def arrivals(self) -> Iterator[tuple[int, ExpertWeights]]:
        """Every distinct requested expert once, in any order; each is valid until the next."""


def project(weights: Weights, name: str, x_TX: F32, ops: Ops) -> F32:
    """x_TX times the transpose of the named matrix: out_TY."""
    out_TY = np.empty((x_TX.shape[0], weights.rows(name)), x_TX.dtype)
    for first_row, panel in weights.panels(name):
        ops.matmul(panel, x_TX, out_TY=out_TY, first_row=first_row)
    return out_TY


def layer_order(config: ModelConfig, layer: int) -> tuple[str, ...]:
    """Trunk entries of a layer in the order of use; `VECTORS` stands for all its small tensors."""
    return (VECTORS, *_attention_order(config, layer), *_mlp_order(config, layer))


def top_order() -> tuple[str, ...]:
    """Trunk entries after the last layer."""
    return (VECTORS, "lm_head")


def _attention_order(config: ModelConfig, layer: int) -> tuple[str, ...]:
    if config.is_mla(layer):
        query = ("q_a_proj", "q_b_proj") if config.q_lora_rank is not None else ("q_proj",)
        gate = ("g_proj",) if config.mla_output_gate else ()
        return (*query, "kv_a_proj", "kv_b_proj", *gate, "o_proj")
    output_gate = ("g_proj",) if config.full_rank_gate else ("g_a_proj", "g_b_proj")
    return ("q_proj", "k_proj", "v_proj", "f_a_proj", "f_b_proj", "b_proj", *output_gate, "o_proj")


def _mlp_order(config: ModelConfig, layer: int) -> tuple[str, ...]:
    if not config.is_moe(layer):
        return ("gate_proj", "up_proj", "down_proj")
    shared = ("shared_gate", "shared_up", "shared_down") if config.num_shared_experts else ()
    if config.latent_width is None:
        return ("router", *shared)
    return ("router", "latent_down", *shared, "latent_up")
