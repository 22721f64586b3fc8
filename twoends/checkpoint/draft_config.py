"""A draft layer on disk: what it is, for which model, and which tensors it must have.

    DIR/config.json          the fields of `DraftConfig`; one more or one less is refused
    DIR/draft.safetensors    the layer, matrices BF16 and norms F32; no embedding, no head
    DIR/README.md            a card

The layer reads hidden states of the model that it drafts for, and uses that model's embedding and head.
So it belongs to one architecture and one vocabulary; `refuse_other_target` compares both by digest.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twoends.checkpoint import names
from twoends.checkpoint.config import ModelConfig
from twoends.checkpoint.names import TensorSpec
from twoends.errors import CheckpointError, ConfigError, OptionError

FORMAT = "twoends-draft-1"
CONFIG_NAME, WEIGHTS_NAME = "config.json", "draft.safetensors"
RANK_FILE = "tiktoken.model"
FINAL = "final"
_BLOCK = re.compile(r"block\.(0|[1-9][0-9]{0,3})")
_DIGEST = re.compile(r"[0-9a-f]{32}")
_LAYER_PREFIX = re.compile(r"^(?:language_model\.)?model\.layers\.0\.")
_MOST_STEPS = 64
_MOST_WIDTH = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftConfig:
    """Everything that config.json of a draft layer says. Attention has the shape of the target's MLA layers.

    features          hidden states that are read: "final", what the target's last norm reads, and "block.N",
                      the running sum at the end of AttnRes block N (from 0)
    mlp_width         inner width of the layer's MLP
    unrolled_steps    how many ids in a row it was trained to guess
    target            a word for people; the digests say what it must be
    target_config     ModelConfig.digest of the target
    target_tokenizer  BLAKE2b-128 of the target's tiktoken.model
    """

    format: str
    features: tuple[str, ...]
    hidden_size: int
    vocab_size: int
    mlp_width: int
    unrolled_steps: int
    target: str
    target_config: str
    target_tokenizer: str


def read_draft_config(directory: Path) -> DraftConfig:
    """config.json of a draft layer. Raises ConfigError for a field too many, too few, or wrong."""
    path = directory / CONFIG_NAME
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{path} can't be read: {error.strerror}.",
            remedies=["A draft is made by:  twoends train --draft-of"],
        ) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}.", evidence=[("file", str(path))]) from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} must hold one JSON object.", evidence=[("file", str(path))])
    known = [field.name for field in dataclasses.fields(DraftConfig)]
    _refuse_fields(path, "has unknown fields", sorted(set(raw) - set(known)), known)
    _refuse_fields(path, "misses fields", sorted(set(known) - set(raw)), list(raw))
    _check_values(path, raw)
    return DraftConfig(**(raw | {"features": tuple(raw["features"])}))


def is_draft_layer(directory: Path) -> bool:
    """Whether a directory says that it holds a draft layer; a checkpoint's config.json has no such field."""
    try:
        raw = json.loads((directory / CONFIG_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(raw, dict) and str(raw.get("format", "")).startswith("twoends-draft")


def draft_config_text(config: DraftConfig) -> str:
    """The same as JSON."""
    return json.dumps(dataclasses.asdict(config), indent=2) + "\n"


def tokenizer_digest(directory: Path) -> str | None:
    """BLAKE2b-128 of a checkpoint's rank file; None where it has none."""
    path = directory / RANK_FILE
    return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest() if path.is_file() else None


def feature_block(feature: str) -> int | None:
    """N of "block.N"; None for "final"."""
    return None if feature == FINAL else int(feature.removeprefix("block."))


def num_blocks(target: ModelConfig) -> int:
    """AttnRes blocks of a model, the last and shorter one included; 0 in a model without them."""
    return 0 if target.attnres_block is None else -(-target.num_layers // target.attnres_block)


def refuse_other_target(
    draft: DraftConfig, target: ModelConfig, *, target_name: str, draft_name: str, tokenizer: str | None
) -> None:
    """Raises OptionError unless the draft was made for a model of this architecture and vocabulary.

    `target` is the model as released (no other epsilon, no other activations); without a tokenizer of its own
    (None) only the architecture is compared.
    """
    rows = [
        ("hidden size", f"{target.hidden_size:,}", f"{draft.hidden_size:,}"),
        ("size of the vocabulary", f"{target.vocab_size:,}", f"{draft.vocab_size:,}"),
        ("digest of the config", target.digest, draft.target_config),
        ("digest of the tokenizer", tokenizer or draft.target_tokenizer, draft.target_tokenizer),
    ]
    wrong = [
        (name, f"{ours} in this model", f"{theirs} in the draft")
        for name, ours, theirs in rows
        if ours != theirs
    ]
    if wrong:
        raise OptionError(
            f"the draft {draft_name} was made for another model than {target_name}.",
            evidence=[("made for", draft.target), *wrong],
            remedies=[f"Make one for it:  twoends train --draft-of {target_name} --out DIR"],
        )
    blocks = num_blocks(target)
    for feature in draft.features:
        block = feature_block(feature)
        if block is not None and block >= blocks:
            raise OptionError(
                f"the draft {draft_name} reads {feature}; {target_name} has {blocks} blocks.",
                evidence=[("known", ", ".join([*(f"block.{n}" for n in range(blocks)), FINAL]))],
            )


def layer_config(draft: DraftConfig, target: ModelConfig) -> ModelConfig:
    """The draft layer as a model of one layer: MLA as in the target, a dense MLP, plain residuals."""
    return dataclasses.replace(
        target,
        num_layers=1,
        num_dense_layers=1,
        dense_width=draft.mlp_width,
        mla_layers=(0,),
        attnres_block=None,
        expert_activations="f32",
    )


def draft_specs(draft: DraftConfig, target: ModelConfig) -> tuple[TensorSpec, ...]:
    """Every tensor of the file: short name, file name, shape, dtype; in the order of use."""
    width, count = draft.hidden_size, len(draft.features)
    joins = [
        *(_spec(f"feature_norm.{i}", f"feature_norms.{i}.weight", width) for i in range(count)),
        _spec("fc", "fc.weight", width, count * width),
        _spec("embed_norm", "enorm.weight", width),
        _spec("hidden_norm", "hnorm.weight", width),
        _spec("join", "eh_proj.weight", width, 2 * width),
    ]
    layer = [
        _spec(spec.short, _LAYER_PREFIX.sub("", spec.file_name), *spec.shape)
        for spec in names.layer_specs(layer_config(draft, target), 0)
    ]
    return (*joins, *layer, _spec("final_norm", "norm.weight", width))


def check_tensors(
    path: Path, found: dict[str, tuple[str, tuple[int, ...]]], specs: tuple[TensorSpec, ...]
) -> None:
    """`found` are name -> (dtype, shape) of the file. Raises CheckpointError for any that differs."""
    wanted = {spec.file_name: (str(spec.released), spec.shape) for spec in specs}
    for name in sorted(set(wanted) | set(found)):
        if wanted.get(name) != found.get(name):
            raise CheckpointError(
                f"{path.name} is not the draft layer that its config describes: {name}.",
                evidence=[
                    ("file", str(path)),
                    ("expected", _told(wanted.get(name))),
                    ("found", _told(found.get(name))),
                ],
                remedies=["Export the draft again:  twoends train --draft-of MODEL --out DIR --resume"],
            )


def _told(tensor: tuple[str, tuple[int, ...]] | None) -> str:
    return "no such tensor" if tensor is None else f"{tensor[0]} {list(tensor[1])}"


def _spec(short: str, file_name: str, *shape: int) -> TensorSpec:
    # Norms are few bytes and stay as they were trained.
    return TensorSpec(
        short=short, file_name=file_name, shape=shape, released="BF16" if len(shape) == 2 else "F32"
    )


def _refuse_fields(path: Path, problem: str, fields: list[str], known: list[str]) -> None:
    if not fields:
        return
    rows = []
    for name in fields:
        near = difflib.get_close_matches(name, known, 1)
        rows.append((name, f"nearest: {near[0]}" if near else ""))
    raise ConfigError(f"{path} {problem}.", evidence=rows, remedies=["None is guessed and none is ignored."])


def _check_values(path: Path, raw: dict[str, Any]) -> None:
    checks = {
        "format": raw["format"] == FORMAT,
        "features": _are_features(raw["features"]),
        "hidden_size": _is_count(raw["hidden_size"], _MOST_WIDTH),
        "vocab_size": _is_count(raw["vocab_size"], _MOST_WIDTH),
        "mlp_width": _is_count(raw["mlp_width"], _MOST_WIDTH),
        "unrolled_steps": _is_count(raw["unrolled_steps"], _MOST_STEPS),
        "target": isinstance(raw["target"], str),
        "target_config": _is_digest(raw["target_config"]),
        "target_tokenizer": _is_digest(raw["target_tokenizer"]),
    }
    expected = {
        "format": FORMAT,
        "features": 'distinct, each "final" or "block.N"',
        "target": "a word",
        "target_config": "32 hex digits",
        "target_tokenizer": "32 hex digits",
    }
    for name, is_right in checks.items():
        if not is_right:
            raise ConfigError(
                f"{path} has a wrong '{name}'.",
                evidence=[
                    ("expected", expected.get(name, "a whole number, at least 1")),
                    ("found", repr(raw[name])),
                ],
            )


def _are_features(value: Any) -> bool:
    if not isinstance(value, list) or not value or not all(isinstance(word, str) for word in value):
        return False
    return len(set(value)) == len(value) and all(word == FINAL or _BLOCK.fullmatch(word) for word in value)


def _is_count(value: Any, most: int) -> bool:
    return type(value) is int and 1 <= value <= most


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None
