"""The mathematics of a draft layer: one MLA layer over hidden states of the model that it guesses for.

Row t joins what the target made of the ids up to t with the embedding of id t + 1, and says what id t + 2 may
be. Guessing goes on without the target: the next row takes the layer's own output in place of the target's
hidden states, and the embedding of the id that was guessed (the form of EAGLE-3).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from twoends.checkpoint.config import ModelConfig
from twoends.checkpoint.draft_file import DraftTensors
from twoends.kernels.ops import F32, Ops
from twoends.model.mla import MlaPart, mla_attention
from twoends.model.moe import dense_mlp
from twoends.model.weights import Panel, project


class DraftWeights:
    """Implements model.weights.Weights with tensors that are in memory; `head` are the panels of lm_head."""

    def __init__(self, tensors: DraftTensors, head: Sequence[Panel]) -> None:
        self._vectors = tensors.vectors
        self._panels: dict[str, list[Panel]] = {
            name: [(0, 0, matrix)] for name, matrix in tensors.matrices.items()
        }
        self._panels["lm_head"] = list(head)

    def vector(self, name: str) -> F32:
        """A norm in binary32."""
        return self._vectors[name]

    def rows(self, name: str) -> int:
        """Rows of a whole matrix."""
        return sum(matrix.rows for _, _, matrix in self._panels[name])

    def panels(self, names: tuple[str, ...]) -> Iterator[list[Panel]]:
        """All at once."""
        yield [(i, first, matrix) for i, name in enumerate(names) for _, first, matrix in self._panels[name]]


def join_features(weights: DraftWeights, features_NTD: F32, config: ModelConfig, ops: Ops) -> F32:
    """g_TD: the target's hidden states, each with a norm of its own, in one vector."""
    normed = [
        ops.rms_norm(feature_TD, weights.vector(f"feature_norm.{i}"), config.eps)
        for i, feature_TD in enumerate(features_NTD)
    ]
    return project(weights, "fc", np.concatenate(normed, axis=1), ops)


def draft_rows(
    weights: DraftWeights, g_TD: F32, embedding_TD: F32, part: MlaPart, config: ModelConfig, ops: Ops
) -> F32:
    """The layer's output h_TD, also the g of the next guessed row; the cache rows of `part` are written."""
    joined = np.concatenate(
        [
            ops.rms_norm(embedding_TD, weights.vector("embed_norm"), config.eps),
            ops.rms_norm(g_TD, weights.vector("hidden_norm"), config.eps),
        ],
        axis=1,
    )
    h_TD = project(weights, "join", joined, ops)
    x_TD = ops.rms_norm(h_TD, weights.vector("input_norm"), config.eps)
    h_TD = h_TD + mla_attention(weights, x_TD, [part], config, ops)
    x_TD = ops.rms_norm(h_TD, weights.vector("post_attn_norm"), config.eps)
    out_TD: F32 = h_TD + dense_mlp(weights, x_TD, config, ops)
    return out_TD


def draft_logits(weights: DraftWeights, h_TD: F32, config: ModelConfig, ops: Ops) -> F32:
    """logits_TW by the target's head."""
    return project(weights, "lm_head", ops.rms_norm(h_TD, weights.vector("final_norm"), config.eps), ops)
