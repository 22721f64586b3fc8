"""What the mathematics needs to know of weights: small vectors by name, matrices panel by panel.

A panel is a run of whole rows of one matrix. Layers ask for their weights in the order of
`layer_order`, so that a store may read ahead of them; each matrix is asked for once a pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np

from twoends.checkpoint.config import ModelConfig
from twoends.kernels.ops import F32, I32, ExpertWeights, Matrix, Ops

VECTORS = "vectors"

# Which of the matrices asked for, the panel's first row in it, and its rows.
Panel = tuple[int, int, Matrix]


class Weights(Protocol):
    """The trunk weights of one layer, or of the top (norm and head)."""

    def vector(self, name: str) -> F32:
        """A small tensor in binary32, in the shape of the checkpoint without its unit axes."""

    def rows(self, name: str) -> int:
        """Number of rows of a whole matrix."""

    def panels(self, names: tuple[str, ...]) -> Iterator[list[Panel]]:
        """Every panel of the matrices, in order, in groups as they are there; valid until the next group."""


class Experts(Protocol):
    """The routed experts of one layer, for one pass."""

    def request(self, ids_TS: I32) -> None:
        """Says which experts will be needed; reading may begin."""

    def arrivals(self) -> Iterator[list[tuple[int, ExpertWeights]]]:
        """Every distinct requested expert once, in any order, in groups; valid until the next group."""


def project(weights: Weights, name: str, x_TX: F32, ops: Ops) -> F32:
    """x_TX times the transpose of the named matrix: out_TY."""
    return project_all(weights, (name,), x_TX, ops)[0]


def project_all(weights: Weights, names: tuple[str, ...], x_TX: F32, ops: Ops) -> list[F32]:
    """x_TX times the transpose of each named matrix, in as few calls as the panels' arrival allows."""
    outs = [np.empty((x_TX.shape[0], weights.rows(name)), x_TX.dtype) for name in names]
    for group in weights.panels(names):
        ops.products(x_TX, [(matrix, outs[i], first_row) for i, first_row, matrix in group])
    return outs


def layer_order(config: ModelConfig, layer: int) -> tuple[str, ...]:
    """Trunk entries of a layer in the order of use; `VECTORS` stands for all its small tensors."""
    return (VECTORS, *_attention_order(config, layer), *_mlp_order(config, layer))


def mla_inputs(config: ModelConfig) -> tuple[str, ...]:
    """Matrices of an MLA layer that read its input: the query's first, the latent's, the gate's if any."""
    query = "q_a_proj" if config.q_lora_rank is not None else "q_proj"
    return (query, "kv_a_proj", *(("g_proj",) if config.mla_output_gate else ()))


def kda_inputs(config: ModelConfig) -> tuple[str, ...]:
    """Matrices of a KDA layer that read its input."""
    gate = "g_proj" if config.full_rank_gate else "g_a_proj"
    return ("q_proj", "k_proj", "v_proj", "f_a_proj", "b_proj", gate)


def top_order() -> tuple[str, ...]:
    """Trunk entries after the last layer."""
    return (VECTORS, "lm_head")


def _attention_order(config: ModelConfig, layer: int) -> tuple[str, ...]:
    if config.is_mla(layer):
        late_query = ("q_b_proj",) if config.q_lora_rank is not None else ()
        return (*mla_inputs(config), *late_query, "kv_b_proj", "o_proj")
    late_gate = () if config.full_rank_gate else ("g_b_proj",)
    return (*kda_inputs(config), "f_b_proj", *late_gate, "o_proj")


def _mlp_order(config: ModelConfig, layer: int) -> tuple[str, ...]:
    if not config.is_moe(layer):
        return ("gate_proj", "up_proj", "down_proj")
    shared = ("shared_gate", "shared_up", "shared_down") if config.num_shared_experts else ()
    if config.latent_width is None:
        return ("router", *shared)
    return ("router", "latent_down", *shared, "latent_up")
