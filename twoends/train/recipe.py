"""A training run as one TOML file. An unknown or missing key is an error that names it."""

from __future__ import annotations

import difflib
import json
import tomllib
from dataclasses import dataclass, fields
from importlib import resources
from pathlib import Path
from typing import Any

from twoends.checkpoint.presets import NUM_SPECIALS
from twoends.errors import OptionError
from twoends.train.architecture import Architecture

# The one preset that is no model's (draft_recipe.py).
DRAFT_PRESET = "draft"
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
    """Ranks of the vocabulary (bytes and merges) and the amount of text they are learnt from.

    `file` names a rank file in tiktoken's form to use instead ("" learns one); it must hold num_ranks ranks.
    """

    num_ranks: int
    sample_characters: int
    file: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainRecipe:
    """Optimisation: a step is `batch_rows` rows, `micro_rows` at a time, shared out over all ranks.

    momentum, qk_clip      read by Muon; qk_clip 0 clips nothing
    beta1, beta2           AdamW's
    router_bias_keep       share of the old bias in a step of quantile balancing
    sign_rate              length of a sign step
    auxiliary_weight       of the auxiliary loss
    expert_weights         number form of routed experts in the forward pass; the export is always MXFP4
    pack_documents         a document sees nothing of those before it in its row
    recompute              activations of a layer are computed again in the backward pass, not kept
    prompts                what the engine continues at each snapshot
    """

    seed: int
    steps: int
    batch_rows: int
    micro_rows: int
    row_tokens: int
    optimiser: str
    learning_rate: float
    final_learning_rate: float
    warmup_share: float
    weight_decay: float
    beta1: float
    beta2: float
    momentum: float
    qk_clip: float
    clip_norm: float
    balance: str
    router_bias_keep: float
    sign_rate: float
    auxiliary_weight: float
    expert_weights: str
    expert_activations: str
    pack_documents: bool
    recompute: bool
    mtp: bool
    matmul_dtype: str
    compile: bool
    snapshot_minutes: float
    prompts: tuple[str, ...]


# Words that a [train] key may have.
CHOICES = {
    "optimiser": ("per-head-muon", "muon", "adamw"),
    "balance": ("none", "sign", "quantile", "auxiliary"),
    "expert_weights": ("mxfp4", "none"),
    "expert_activations": ("none", "mxfp8"),
    "matmul_dtype": ("float32", "bfloat16"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Everything that decides the bits of a run, apart from the machine."""

    model: Architecture
    tokenizer: TokenizerRecipe
    data: DataRecipe
    train: TrainRecipe


def refuse_keys(path: Path, section: str, problem: str, keys: set[str], known: set[str]) -> OptionError:
    """The error for keys that are too many or too few, each with the nearest known one."""
    rows = []
    for key in sorted(keys):
        near = difflib.get_close_matches(key, sorted(known), 1)
        rows.append((key, f"nearest known: {near[0]}" if near else ""))
    return OptionError(f"the recipe {path} {problem} in [{section}].", evidence=rows)


def read_section(raw: dict[str, Any], name: str, record: type, *, path: Path, derived: dict[str, int]) -> Any:
    """Section [name] as a `record`: every field given, in its own type, and nothing else."""
    if not isinstance(raw.get(name), dict):
        raise OptionError(f"the recipe {path} has no section [{name}].")
    given = raw[name] | derived
    known = {field.name for field in fields(record)}
    if unknown := set(given) - known:
        raise refuse_keys(path, name, "has unknown keys", unknown, known)
    if missing := known - set(given):
        raise refuse_keys(path, name, "misses keys", missing, set(given))
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


def read_sections(text: str, record: type, *, path: Path) -> dict[str, Any]:
    """The sections of a recipe, each a field of `record`. Raises OptionError where it is no TOML."""
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise OptionError(f"the recipe {path} isn't TOML: {error}.") from error
    known = {field.name for field in fields(record)}
    if unknown := set(raw) - known:
        raise refuse_keys(path, "top level", "has unknown sections", unknown, known)
    return raw


def parse_recipe(text: str, *, path: Path) -> Recipe:
    """The recipe in `text`; `path` only names it in errors."""
    raw = read_sections(text, Recipe, path=path)
    tokenizer = read_section(raw, "tokenizer", TokenizerRecipe, path=path, derived={})
    if stated := _DERIVED & set(raw.get("model", {})):
        raise refuse_keys(path, "model", "states what the tokenizer decides", set(stated), set())
    ranks = tokenizer.num_ranks
    derived = {
        "vocab_size": ranks + NUM_SPECIALS,
        "bos_token_id": ranks,
        "eos_token_id": ranks + 1,
        "pad_token_id": ranks + NUM_SPECIALS - 1,
    }
    recipe = Recipe(
        model=read_section(raw, "model", Architecture, path=path, derived=derived),
        tokenizer=tokenizer,
        data=read_section(raw, "data", DataRecipe, path=path, derived={}),
        train=read_section(raw, "train", TrainRecipe, path=path, derived={}),
    )
    check_choices(recipe.train)
    return recipe


def check_choices(train: TrainRecipe) -> None:
    """Raises OptionError for a word that means nothing, and for sizes that no step can have."""
    for key, known in CHOICES.items():
        if (word := getattr(train, key)) not in known:
            raise OptionError(f"{key} is {word!r}; known are {', '.join(known)}.")
    for key in ("steps", "batch_rows", "micro_rows", "row_tokens"):
        if getattr(train, key) < 1:
            raise OptionError(f"{key} is {getattr(train, key)}; it must be at least 1.")


def recipe_text(recipe: Any) -> str:
    """A recipe (sections of fields) as TOML, which its parser reads back to the same record."""
    lines = []
    for section in fields(recipe):
        record = getattr(recipe, section.name)
        lines += ["", f"[{section.name}]"]
        tables = []
        for field in fields(record):
            value = getattr(record, field.name)
            if field.name in _DERIVED:
                continue
            if isinstance(value, dict):
                tables += ["", f"[{section.name}.{field.name}]"]
                tables += [f"{key} = {json.dumps(number)}" for key, number in value.items()]
            else:
                lines.append(f"{field.name} = {json.dumps(value)}")
        lines += tables
    return "\n".join(lines[1:]) + "\n"


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
    if name == DRAFT_PRESET:
        raise OptionError(
            f"the preset {name!r} makes a draft layer of a model.",
            remedies=["Name the model:  --draft-of MODEL"],
        )
    names.remove(DRAFT_PRESET)
    if name not in names:
        raise OptionError(f"there is no preset {name!r}; there is {', '.join(names)}.")
    return parse_recipe(
        folder.joinpath(f"{name}.toml").read_text(encoding="utf-8"), path=Path(f"{name}.toml")
    )
