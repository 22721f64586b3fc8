"""A whole checkpoint in memory, read by the safetensors library, and our model code on it in binary64.

Nothing of the engine and nothing of our reader is used: what the engine gives is compared with this.
Imports torch; a test module skips itself before it imports this.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors.torch import load_file

from tests.support.resident import NamedExperts, NamedWeights
from twoends.checkpoint import mxfp4
from twoends.checkpoint.config import ModelConfig, read_config
from twoends.kernels.binary64 import binary64_ops
from twoends.model.attnres import Residual
from twoends.model.layer import attention_half, head_logits, mixture_half
from twoends.model.rows import SequenceRows
from twoends.model.state import SequenceState


class WholeCheckpoint:
    """Every tensor as binary32 values (all formats of the release are subsets); `config` beside it."""

    def __init__(self, directory: Path) -> None:
        self.config: ModelConfig = read_config(directory)
        self._tensors = {}
        for shard in sorted(directory.glob("*.safetensors")):
            self._tensors |= load_file(shard)
        self._prefix = "language_model." if self.config.family == "kimi-k3" else ""

    def values(self, name: str) -> np.ndarray:
        """The values of `name`, which is the file's without `language_model.` and `model.`; exact."""
        stem = self._prefix + ("" if name == "lm_head.weight" else "model.") + name
        if (packed := self._tensors.get(f"{stem}_packed")) is not None:
            return mxfp4.decode(packed.numpy(), self._tensors[f"{stem}_scale"].numpy())
        return self._tensors[stem].float().numpy()

    def nudged_values(self, name: str) -> np.ndarray:
        """The same, every value moved by one unit in its last binary32 place, up or down at random.

        Rounding a number to binary32 moves it by half as much at most, so this shows the size of error
        that one rounding of every weight makes: no evaluation in binary32 does much better.
        """
        exact = self.values(name)
        rng = np.random.default_rng(list(name.encode()))
        return np.nextafter(exact, rng.choice(np.array([-np.inf, np.inf], np.float32), exact.shape))


def binary64_logits(checkpoint: WholeCheckpoint, ids: list[int], *, lookup=None) -> np.ndarray:
    """Logits [T, W] of every position by the model code on binary64 operations, one pass."""
    lookup = lookup or checkpoint.values
    config, ops = checkpoint.config, binary64_ops()
    state = SequenceState(config, capacity=len(ids), dtype=np.float64)
    rows = [SequenceRows(state=state, first=0, count=len(ids))]
    residual = Residual(lookup("embed_tokens.weight")[ids].astype(np.float64), config)
    sizes = {"head_rows": config.nope_dim + config.value_dim, "panel_rows": 1 << 20, "dtype": np.float64}
    for i in range(config.num_layers):
        weights = NamedWeights(lookup, f"layers.{i}.", **sizes)
        attention_half(weights, residual, rows, layer=i, config=config, ops=ops)
        experts = NamedExperts(lookup, f"layers.{i}.") if config.is_moe(i) else None
        mixture_half(weights, experts, residual, config=config, ops=ops)
    top = NamedWeights(lookup, "", **sizes)
    return head_logits(top, residual.input(top, "output_res", ops), config, ops)
