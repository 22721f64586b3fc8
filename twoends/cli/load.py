"""What comes before any weight is read: the checkpoint, its tokenizer, the kernels, the budget."""

from __future__ import annotations

import os
from pathlib import Path

from twoends.checkpoint.shipped import shipped_model
from twoends.cli.command import Values
from twoends.engine.memory import default_budget_bytes
from twoends.engine.open import Checkpoint
from twoends.engine.profile import ExpertProfile, read_profile
from twoends.errors import OptionError
from twoends.generate.tokenizer import Tokenizer
from twoends.generate.tokenizer_files import RANK_FILE
from twoends.kernels.choose import Choice, choose

_PATH_STARTS = ("/", "./", "../", "~")


def model_and_prompt(first: str | None, second: str | None, *, no_prompt: bool) -> tuple[Path, str | None]:
    """What one or two words mean: MODEL and PROMPT, MODEL alone, or PROMPT for the shipped model.

    One word is the model if it is a directory or if there is no place for a prompt (`no_prompt`).
    Raises OptionError for a word that looks like a path and is none.
    """
    if first is None:
        return shipped_model(), None
    if second is not None or no_prompt or Path(first).is_dir():
        return Path(first), second
    if first.startswith(_PATH_STARTS) and not any(c.isspace() for c in first):
        raise OptionError(
            f"there is no directory {first}.",
            remedies=["To use it as a prompt, name the model as well:  twoends run MODEL PROMPT"],
        )
    return shipped_model(), first


def open_tokenizer(checkpoint: Checkpoint, *, needed: bool) -> Tokenizer | None:
    """The checkpoint's tokenizer; None if it has none and none is `needed`. Raises TokenizerError."""
    if not needed and not (checkpoint.directory / RANK_FILE).exists():
        return None
    return Tokenizer.open(checkpoint.directory, vocab_size=checkpoint.config.vocab_size)


def profile(path: Path | None, checkpoint: Checkpoint) -> ExpertProfile | None:
    """--profile, of this very model. Raises OptionError for another's, or a damaged file."""
    if path is None:
        return None
    return read_profile(
        path,
        fingerprint=checkpoint.index.fingerprint,
        num_layers=len(checkpoint.config.moe_layers),
        num_experts=checkpoint.config.num_experts,
    )


def choose_kernels(values: Values) -> Choice:
    """The kernels that --threads, --kernels and TWOENDS_ISA ask for."""
    return choose(threads=values.threads, isa=os.environ.get("TWOENDS_ISA"), kernels=values.kernels)


def budget_bytes(values: Values) -> int:
    """--ram, or most of what is available now."""
    if values.ram is not None:
        return int(values.ram)
    return default_budget_bytes()
