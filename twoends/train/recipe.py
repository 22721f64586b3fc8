"""A training run as one TOML file. An unknown or missing key is an error that names it."""

from __future__ import annotations

import difflib
import tomllib
from dataclasses import dataclass, fields
from importlib import resources
from pathlib import Path
from typing import Any

from twoends.checkpoint.presets import NUM_SPECIALS
from twoends.errors import OptionError
from twoends.train.architecture import Architecture

# Derived from the tokenizer, so a recipe doesn't state them.
_DERIVED = frozenset({"vocab_size", "bos_token_id", "eos_token_id", "pad_token_id"})


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRecipe:
    """How much text, from which sources; `shares` are of characters."""

    stories: int
    echoes: int
    tasks: int
    characters: int
    shares: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerRecipe:
    """Ranks of the vocabulary (bytes and merges) and the amount of text they are learnt from."""

    num_ranks: int
    sample_characters: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainRecipe:
    """Optimisation: AdamW, linear warm-up, cosine to the final rate."""

    seed: int
    steps: int
    batch_rows: int
    row_tokens: int
    learning_rate: float
    final_learning_rate: float
    warmup_steps: int
    weight_decay: float
    beta1: float
    beta2: float
    clip_norm: float
    router_bias_keep: float
    matmul_dtype: str
    compile: bool
    snapshot_minutes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Everything that decides the bits of a run, apart from the machine."""

    model: Architecture
    tokenizer: TokenizerRecipe
    data: DataRecipe
    train: TrainRecipe


def _refuse(path: Path, section: str, problem: str, keys: set[str], known: set[str]) -> OptionError:
    rows = []
    for key in sorted(keys):
        near = difflib.get_close_matches(key, sorted(known), 1)
        rows.append((key, f"nearest known: {near[0]}" if near else ""))
    return OptionError(f"the recipe {path} {problem} in [{section}].", evidence=rows)


def _section(raw: dict[str, Any], name: str, record: type, *, path: Path, derived: dict[str, int]) -> Any:
    if not isinstance(raw.get(name), dict):
        raise OptionError(f"the recipe {path} has no section [{name}].")
    given = raw[name] | derived
    known = {field.name for field in fields(record)}
    if unknown := set(given) - known:
        raise _refuse(path, name, "has unknown keys", unknown, known)
    if missing := known - set(given):
        raise _refuse(path, name, "misses keys", missing, set(given))
    values = {}
    for field in fields(record):
        value = given[field.name]
        if field.type in ("int", "float", "bool", "str"):
            wanted = {"int": int, "float": float, "bool": bool, "str": str}[str(field.type)]
            if wanted is float and type(value) is int:
                value = float(value)
            if type(value) is not wanted:
                raise OptionError(
                    f"the recipe {path} wants {field.type} for {field.name} in [{name}], not {value!r}."
                )
        values[field.name] = tuple(value) if isinstance(value, list) else value
    return record(**values)


def parse_recipe(text: str, *, path: Path) -> Recipe:
    """The recipe in `text`; `path` only names it in errors."""
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise OptionError(f"the recipe {path} isn't TOML: {error}.") from error
    known = {field.name for field in fields(Recipe)}
    if unknown := set(raw) - known:
        raise _refuse(path, "top level", "has unknown sections", unknown, known)
    tokenizer = _section(raw, "tokenizer", TokenizerRecipe, path=path, derived={})
    if stated := _DERIVED & set(raw.get("model", {})):
        raise _refuse(path, "model", "states what the tokenizer decides", set(stated), set())
    ranks = tokenizer.num_ranks
    derived = {
        "vocab_size": ranks + NUM_SPECIALS,
        "bos_token_id": ranks,
        "eos_token_id": ranks + 1,
        "pad_token_id": ranks + NUM_SPECIALS - 1,
    }
    return Recipe(
        model=_section(raw, "model", Architecture, path=path, derived=derived),
        tokenizer=tokenizer,
        data=_section(raw, "data", DataRecipe, path=path, derived={}),
        train=_section(raw, "train", TrainRecipe, path=path, derived={}),
    )


def read_recipe(path: Path) -> Recipe:
    """The recipe in a file."""
    if not path.is_file():
        raise OptionError(f"there is no recipe at {path}.")
    return parse_recipe(path.read_text(encoding="utf-8"), path=path)


def preset(name: str) -> Recipe:
    """A recipe that ships with the package."""
    folder = resources.files("twoends.train").joinpath("recipes")
    names = sorted(
        entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml")
    )
    if name not in names:
        raise OptionError(f"there is no preset {name!r}; there is {', '.join(names)}.")
    return parse_recipe(
        folder.joinpath(f"{name}.toml").read_text(encoding="utf-8"), path=Path(f"{name}.toml")
    )
