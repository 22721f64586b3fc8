"""The training of a draft layer as one TOML file; what it drafts for is said on the command line."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from twoends.errors import OptionError
from twoends.train.draft_loss import LOSSES
from twoends.train.recipe import CHOICES, DRAFT_PRESET, DataRecipe, read_section, read_sections


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftShape:
    """The layer (checkpoint/draft_config.py) and what it is trained for.

    unrolled_steps   how many ids in a row it learns to guess
    losses           one layer is trained for each, all from the same numbers on the same text; the first is
                     exported, the others are there to be compared
    """

    features: tuple[str, ...]
    mlp_width: int
    unrolled_steps: int
    losses: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftTrainRecipe:
    """Optimisation, in the words of TrainRecipe; the target is frozen and always in binary32."""

    seed: int
    steps: int
    batch_rows: int
    row_tokens: int
    heldout_rows: int
    optimiser: str
    learning_rate: float
    final_learning_rate: float
    warmup_share: float
    weight_decay: float
    beta1: float
    beta2: float
    momentum: float
    clip_norm: float
    matmul_dtype: str
    snapshot_minutes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRecipe:
    """Everything that decides the bits of a draft's training, apart from the machine and the target."""

    draft: DraftShape
    data: DataRecipe
    train: DraftTrainRecipe


def parse_draft_recipe(text: str, *, path: Path) -> DraftRecipe:
    """The recipe in `text`; `path` only names it in errors. Raises OptionError."""
    raw = read_sections(text, DraftRecipe, path=path)
    recipe = DraftRecipe(
        draft=read_section(raw, "draft", DraftShape, path=path, derived={}),
        data=read_section(raw, "data", DataRecipe, path=path, derived={}),
        train=read_section(raw, "train", DraftTrainRecipe, path=path, derived={}),
    )
    check_draft_recipe(recipe)
    return recipe


def check_draft_recipe(recipe: DraftRecipe) -> None:
    """Raises OptionError for a word that means nothing, and for sizes that no step can have."""
    draft, train = recipe.draft, recipe.train
    for key in ("optimiser", "matmul_dtype"):
        if (word := getattr(train, key)) not in CHOICES[key]:
            raise OptionError(f"{key} is {word!r}; known are {', '.join(CHOICES[key])}.")
    if not draft.losses or len(set(draft.losses)) != len(draft.losses):
        raise OptionError("losses must name one or more, each once.")
    for word in draft.losses:
        if word not in LOSSES:
            raise OptionError(f"there is no loss {word!r}; known are {', '.join(LOSSES)}.")
    for key in ("steps", "batch_rows", "row_tokens", "heldout_rows"):
        if getattr(train, key) < 1:
            raise OptionError(f"{key} is {getattr(train, key)}; it must be at least 1.")
    if not 1 <= draft.unrolled_steps < train.row_tokens:
        raise OptionError(f"unrolled_steps is {draft.unrolled_steps}; a row has {train.row_tokens} tokens.")


def draft_preset() -> DraftRecipe:
    """The recipe that ships."""
    file = resources.files("twoends.train").joinpath("recipes").joinpath(f"{DRAFT_PRESET}.toml")
    return parse_draft_recipe(file.read_text(encoding="utf-8"), path=Path(f"{DRAFT_PRESET}.toml"))


def read_draft_recipe(path: Path) -> DraftRecipe:
    """The recipe in a file."""
    if not path.is_file():
        raise OptionError(f"there is no recipe at {path}.")
    return parse_draft_recipe(path.read_text(encoding="utf-8"), path=path)
