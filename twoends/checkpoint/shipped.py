"""The checkpoint that ships with the package, and the draft layer for it."""

from __future__ import annotations

from pathlib import Path

from twoends.errors import CheckpointError

# What --draft-model calls the draft layer that ships.
SHIPPED_DRAFT = "nano-draft"


def shipped_model() -> Path:
    """The directory of the checkpoint that ships. Raises CheckpointError if this installation lacks it."""
    # Not importlib.resources, which costs 1.6 MB: weights are read from real files in any case.
    place = Path(__file__).parents[1] / "assets" / "nano"
    if (place / "config.json").is_file():
        return place
    raise CheckpointError(
        "the checkpoint that ships with twoends is not in this installation.",
        evidence=[("expected", str(place / "config.json")), ("found", "no such file")],
        remedies=[
            'Name a checkpoint\'s directory:   twoends run MODEL "prompt"',
            "Or write a synthetic one:        twoends tiny DIR --preset nano",
        ],
    )


def shipped_draft() -> Path:
    """The directory of the draft layer that ships. Raises CheckpointError if this installation lacks it."""
    place = Path(__file__).parents[1] / "assets" / SHIPPED_DRAFT
    if (place / "config.json").is_file():
        return place
    raise CheckpointError(
        f"the draft {SHIPPED_DRAFT} is not in this installation.",
        evidence=[("expected", str(place / "config.json")), ("found", "no such file")],
        remedies=["Name a draft's directory, or make one:  twoends train --draft-of MODEL --out DIR"],
    )
