"""write_tiny: a small checkpoint with the real tensor graph, layout and names.

Tests, examples and first tries run on it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from twoends.checkpoint import names, tiny_vocab
from twoends.checkpoint.config import Family, ModelConfig
from twoends.checkpoint.config_write import config_text
from twoends.checkpoint.layout import checkpoint_plans
from twoends.checkpoint.names import ExpertFormat
from twoends.checkpoint.presets import preset_config
from twoends.checkpoint.synthetic import SyntheticWeights
from twoends.checkpoint.writer import write_checkpoint, write_text
from twoends.errors import OptionError

Progress = Callable[[int, int], None]


def write_tiny(
    directory: Path,
    *,
    preset: str = "nano",
    family: Family = "kimi-k3",
    seed: int = 0,
    num_layers: int | None = None,
    sparse: bool = False,
    progress: Progress | None = None,
) -> ModelConfig:
    """Writes a synthetic checkpoint with its tokenizer; equal arguments give equal bytes.

    `sparse` leaves routed experts as holes in the files: they read as zeros and take no room.
    `progress(done_bytes, total_bytes)` is called after each piece. Raises OptionError for an unknown
    preset or a directory that has a checkpoint, DoesNotFit before anything is written.
    """
    config = preset_config(preset, family=family, num_layers=num_layers)
    return write_synthetic(directory, config, seed=seed, sparse=sparse, progress=progress)


def write_synthetic(
    directory: Path,
    config: ModelConfig,
    *,
    seed: int = 0,
    sparse: bool = False,
    progress: Progress | None = None,
) -> ModelConfig:
    """The same for an architecture of your own. Kimi K3's experts are MXFP4, Kimi-Linear's BF16."""
    directory = Path(directory)
    there = [*directory.glob("*.safetensors"), *directory.glob("config.json")]
    if there:
        raise OptionError(
            f"{directory} already has a checkpoint ({there[0].name}).",
            remedies=["Nothing was written. Choose an empty directory."],
        )
    expert_format: ExpertFormat = "mxfp4" if config.family == "kimi-k3" else "bf16"
    weights = SyntheticWeights(config, seed=seed)
    pattern = names.expert_pattern(config)
    write_checkpoint(
        directory,
        list(checkpoint_plans(config, expert_format)),
        weights.pieces,
        is_sparse=lambda name: sparse and pattern.fullmatch(name) is not None,
        progress=progress or (lambda done_bytes, total_bytes: None),
    )
    write_text(directory / "tiktoken.model", tiny_vocab.rank_file(config.vocab_size))
    tokenizer = json.dumps(tiny_vocab.tokenizer_config(config.vocab_size), indent=2)
    write_text(directory / "tokenizer_config.json", tokenizer)
    write_text(directory / "generation_config.json", tiny_vocab.generation_config(config.eos_id))
    write_text(directory / "config.json", config_text(config, expert_format=expert_format))
    return config
