"""Draft layers for tests: random ones, and ones that know a text by heart."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.support.backends import native_isas
from tests.support.running import make_ops, plan_of
from twoends.checkpoint.draft_config import FORMAT, DraftConfig, draft_specs, feature_block, tokenizer_digest
from twoends.checkpoint.draft_file import DraftFile, write_draft
from twoends.engine.open import Checkpoint, OpenModel
from twoends.kernels.ops import Matrix
from twoends.model.draft_layer import DraftWeights, join_features

_BEST = native_isas()[0] if native_isas() else "reference"


def features_of(checkpoint: Checkpoint) -> tuple[str, ...]:
    """What a model has: blocks only where its residuals have them."""
    return ("final",) if checkpoint.config.attnres_block is None else ("block.0", "final", "block.2")


def config_of(checkpoint: Checkpoint, **changes) -> DraftConfig:
    fields = {
        "format": FORMAT,
        "features": features_of(checkpoint),
        "hidden_size": checkpoint.config.hidden_size,
        "vocab_size": checkpoint.config.vocab_size,
        "mlp_width": 48,
        "unrolled_steps": 3,
        "target": "nano",
        "target_config": checkpoint.config.digest,
        "target_tokenizer": tokenizer_digest(checkpoint.directory),
    }
    return DraftConfig(**(fields | changes))


def bf16_bits(values) -> np.ndarray:
    """Nearest, halves up: near enough for a test."""
    return ((np.ascontiguousarray(values, np.float32).view(np.uint32) + 0x8000) >> 16).astype(np.uint16)


def random_tensors(checkpoint: Checkpoint, config: DraftConfig, *, seed: int) -> dict[str, np.ndarray]:
    """By file name; every part of the layer counts."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for spec in draft_specs(config, checkpoint.config):
        if len(spec.shape) == 1:
            tensors[spec.file_name] = rng.normal(1, 0.2, spec.shape).astype(np.float32)
        else:
            tensors[spec.file_name] = bf16_bits(rng.normal(0, spec.shape[1] ** -0.5, spec.shape))
    return tensors


def write_random(checkpoint: Checkpoint, directory: Path, *, seed: int = 1, **changes) -> DraftFile:
    """A layer whose guesses are mostly wrong."""
    config = config_of(checkpoint, **changes)
    tensors = random_tensors(checkpoint, config, seed=seed)
    write_draft(directory, config, checkpoint.config, tensors=tensors, card="A card.\n")
    return DraftFile.open(directory, checkpoint.config)


class Notes:
    """Hidden states and embeddings of one pass over a whole text."""

    def __init__(self, checkpoint: Checkpoint, ids: list[int], features: tuple[str, ...]) -> None:
        self._features = features
        model = OpenModel(checkpoint, plan_of(checkpoint, context=len(ids)), make_ops(_BEST))
        try:
            model.watch(self._see)
            model.run_pass(ids, layer_done=lambda done: None)
            self.head_WD = _values(model.store.resident_head().panels)
        finally:
            model.close()

    def _see(self, start, ids, embedding_TD, residual, h_TD):
        blocks = [feature_block(feature) for feature in self._features]
        self.features_NTD = np.stack([h_TD if n is None else residual.block(n) for n in blocks])
        self.embedding_TD = embedding_TD.copy()


def write_by_heart(checkpoint: Checkpoint, directory: Path, ids: list[int]) -> DraftFile:
    """A layer fitted to guess id t + 2 of a text from the hidden states at t and id t + 1, and nothing else.

    Least squares over fewer rows than there are inputs. It guesses right only where it gets the right rows of
    the right hidden states; what it guesses from its own output is mostly wrong.
    """
    config = config_of(checkpoint)
    tensors = random_tensors(checkpoint, config, seed=3)
    notes = Notes(checkpoint, ids, config.features)
    write_draft(directory, config, checkpoint.config, tensors=tensors, card="A card.\n")
    file = DraftFile.open(directory, checkpoint.config)
    weights, ops = DraftWeights(file.read(), []), make_ops(_BEST)
    count = len(ids) - 2
    g_TD = join_features(weights, np.ascontiguousarray(notes.features_NTD[:, :count]), file.layer, ops)
    rows = [
        ops.rms_norm(notes.embedding_TD[1 : count + 1], weights.vector("embed_norm"), file.layer.eps),
        ops.rms_norm(g_TD, weights.vector("hidden_norm"), file.layer.eps),
    ]
    wanted_TD = notes.head_WD[ids[2:]] / weights.vector("final_norm")
    wanted_TD /= np.linalg.norm(wanted_TD, axis=1, keepdims=True)
    found, *_ = np.linalg.lstsq(np.concatenate(rows, axis=1), wanted_TD, rcond=None)
    tensors["eh_proj.weight"] = bf16_bits(found.T)
    for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
        tensors[name] = np.zeros_like(tensors[name])
    write_draft(directory, config, checkpoint.config, tensors=tensors, card="A card.\n")
    return DraftFile.open(directory, checkpoint.config)


def _values(panels) -> np.ndarray:
    parts = []
    for _, _, matrix in sorted(panels, key=lambda panel: panel[1]):
        assert isinstance(matrix, Matrix)
        data = np.ascontiguousarray(matrix.data)
        if matrix.format == "f32":
            values = data.view(np.float32)
        else:
            values = (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        parts.append(values.reshape(matrix.rows, matrix.cols))
    return np.concatenate(parts)
