"""A trained draft layer as a folder that the engine reads, and what a card says of it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from twoends.checkpoint.config import read_config
from twoends.checkpoint.draft_config import (
    FORMAT,
    DraftConfig,
    num_blocks,
    refuse_other_target,
    tokenizer_digest,
)
from twoends.checkpoint.draft_file import write_draft
from twoends.errors import OptionError
from twoends.train.draft_eval import DraftRates
from twoends.train.draft_layer import DraftLayer
from twoends.train.draft_recipe import DraftRecipe


def target_identity(directory: Path) -> dict[str, str]:
    """What tells a target apart, its weights too. Raises OptionError for one without a tokenizer."""
    tokenizer = tokenizer_digest(directory)
    if tokenizer is None:
        raise OptionError(
            f"{directory} has no tokenizer, so no text can be read for it.",
            remedies=["A draft is trained on text in the ids of the model that it guesses for."],
        )
    weights = hashlib.blake2b(digest_size=16)
    for shard in sorted(directory.glob("*.safetensors")):
        with shard.open("rb") as file:
            weights.update(hashlib.file_digest(file, "blake2b").digest())
    return {
        "name": directory.resolve().name,
        "config": read_config(directory).digest,
        "tokenizer": tokenizer,
        "weights": weights.hexdigest(),
    }


def draft_config(recipe: DraftRecipe, directory: Path, *, identity: Mapping[str, str]) -> DraftConfig:
    """config.json of a draft for the checkpoint in `directory`. Raises OptionError for an unknown feature."""
    target = read_config(directory)
    blocks = [f"block.{n}" for n in range(num_blocks(target))]
    for feature in recipe.draft.features:
        if feature not in (*blocks, "final"):
            raise OptionError(
                f"there is no hidden state {feature!r} in {directory.name}.",
                evidence=[("known", ", ".join([*blocks, "final"]))],
            )
    config = DraftConfig(
        format=FORMAT,
        features=recipe.draft.features,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        mlp_width=recipe.draft.mlp_width,
        unrolled_steps=recipe.draft.unrolled_steps,
        target=identity["name"],
        target_config=identity["config"],
        target_tokenizer=identity["tokenizer"],
    )
    refuse_other_target(
        config, target, target_name=directory.name, draft_name="recipe", tokenizer=identity["tokenizer"]
    )
    return config


def export_draft(layer: DraftLayer, directory: Path, *, config: DraftConfig, target: Path, card: str) -> None:
    """Write the folder: matrices rounded to BF16 (nearest, ties to even), norms in F32.

    Raises CheckpointError for a value that isn't finite.
    """
    tensors = {name: _stored(value) for name, value in layer.state_dict().items()}
    write_draft(directory, config, read_config(target), tensors=tensors, card=card)


def _stored(value: torch.Tensor) -> npt.NDArray[Any]:
    value = value.detach().float().contiguous()
    if value.ndim == 1:
        return np.ascontiguousarray(value.numpy(), np.float32)
    return value.to(torch.bfloat16).view(torch.int16).numpy()


def rates_table(found: Mapping[str, DraftRates]) -> str:
    """The rates as Markdown; steps side by side."""
    steps = len(next(iter(found.values())).greedy)
    head = " | ".join(f"id {s + 1}" for s in range(steps))
    lines = [f"| guesses by | verified | {head} | ids a pass |", "|---|---|" + "---:|" * (steps + 1)]
    words = {"overlap": "speculative sampling", "same_draw": "same draw, temperature 1", "greedy": "greedy"}
    for name, of_name in found.items():
        for key, word in words.items():
            cells = " | ".join(f"{rate:.3f}" for rate in getattr(of_name, key))
            kept = f"{of_name.kept:.2f}" if key == "greedy" else ""
            lines.append(f"| {name} | {word} | {cells} | {kept} |")
        if min(of_name.guessed) < 1:
            cells = " | ".join(f"{rate:.3f}" for rate in of_name.guessed)
            lines.append(f"| {name} | (has a guess) | {cells} | |")
    return "\n".join(lines)


def card_text(
    config: DraftConfig, recipe: DraftRecipe, found: Mapping[str, DraftRates], *, steps: int
) -> str:
    """README.md of the folder."""
    train = recipe.train
    shares = ", ".join(f"{name} {share:g}" for name, share in recipe.data.shares.items())
    return f"""# A draft layer for {config.target}

One latent-attention layer that guesses the next ids of `{config.target}` from hidden states which its
passes leave behind ({", ".join(config.features)}). It has no embedding and no head: those are the model's.
The model verifies every guess, so the text and every bit of the logits are the same with it and without.

```
twoends run MODEL "Once upon a time" --ram 64MB --draft-model DIR
```

## How it was made

`twoends train --draft-of MODEL --out DIR`: {steps:,} steps of {train.batch_rows * train.row_tokens:,} tokens,
seed {train.seed}, {recipe.draft.unrolled_steps} ids unrolled, loss `{recipe.draft.losses[0]}`, model frozen.
Text: {shares} (docs/training.md). The weights are under the licence of the repository.

## How often it is right

Held-out text, every earlier id right; `ids a pass` are kept by greedy verification of
{recipe.draft.unrolled_steps} drafts. `same draw` is how this engine samples: both draw with the same
number. The layers differ in their loss alone; `{recipe.draft.losses[0]}` is the one in this folder.

{rates_table(found)}
"""
