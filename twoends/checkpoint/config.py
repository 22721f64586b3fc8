"""config.json -> ModelConfig. Two layouts are read: Kimi K3's (nested) and Kimi-Linear's (flat).

Nothing is guessed: a field of the architecture that is missing, unknown or at odds with another is
a ConfigError. The file counts layers from 1; they are counted from 0 from here on.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from twoends.checkpoint import config_fields as fields
from twoends.checkpoint.config_fields import check_section, wrong_value
from twoends.errors import ConfigError

Family = Literal["kimi-k3", "kimi-linear"]

_MAX_FILE_BYTES = 16 << 20
# The official code builds the norms of q_a and kv_a without an epsilon, so they get its class default.
_LATENT_EPS = 1e-6
_NOT_ARCHITECTURE = ("bos_id", "eos_id", "pad_id", "digest")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The architecture of one model. Widths are counts of values, layers are 0-based."""

    family: Family
    num_layers: int
    hidden_size: int
    vocab_size: int
    dense_width: int
    num_dense_layers: int
    # gated latent attention (MLA)
    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    mla_output_gate: bool
    # Kimi Delta Attention; gate_lower_bound None means the softplus gate
    kda_num_heads: int
    kda_head_dim: int
    conv_width: int
    gate_lower_bound: float | None
    full_rank_gate: bool
    # mixture of experts; latent_width None means that experts read the full hidden vector
    num_experts: int
    experts_per_token: int
    num_shared_experts: int
    expert_width: int
    latent_width: int | None
    latent_norm: bool
    renormalize: bool
    routed_scaling: float
    activation: Literal["situ", "silu"]
    situ_beta: float
    situ_linear_beta: float | None
    # layers per block of Attention Residuals; None means plain residual additions
    attnres_block: int | None
    eps: float
    # of the norms of q_a and kv_a only; not in the file, see with_latent_eps
    latent_eps: float = _LATENT_EPS
    # what the routed experts' products take in; not in the file, see with_expert_activations
    expert_activations: Literal["f32", "mxfp8"] = "f32"
    mla_layers: tuple[int, ...]
    bos_id: int | None
    eos_id: int | None
    pad_id: int | None
    # tells models apart: BLAKE2b over every field above but the three token ids
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        told = {
            f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in _NOT_ARCHITECTURE
        }
        if self.expert_activations == "f32":
            del told["expert_activations"]  # as released, and as it was before there was a choice
        text = json.dumps(told, sort_keys=True)
        digest = hashlib.blake2b(text.encode("ascii"), digest_size=16).hexdigest()
        object.__setattr__(self, "digest", digest)

    def with_latent_eps(self, latent_eps: float) -> ModelConfig:
        """The same model with another epsilon in the norms of q_a and kv_a (some engines use `eps`)."""
        if not 0 < latent_eps < 1:
            raise ConfigError(f"The latent epsilon {latent_eps!r} is not between 0 and 1.")
        return dataclasses.replace(self, latent_eps=latent_eps)

    def with_expert_activations(self, activations: Literal["f32", "mxfp8"]) -> ModelConfig:
        """The same model with the inputs of its routed experts as they are, or rounded to MXFP8."""
        return dataclasses.replace(self, expert_activations=activations)

    def is_mla(self, layer: int) -> bool:
        """Whether this layer's attention is MLA; KDA otherwise."""
        return layer in self.mla_layers

    def is_moe(self, layer: int) -> bool:
        """Whether this layer has experts; a dense feed-forward otherwise."""
        return layer >= self.num_dense_layers

    def starts_block(self, layer: int) -> bool:
        """Whether a block of Attention Residuals begins at this layer; never without such blocks."""
        return self.attnres_block is not None and layer % self.attnres_block == 0

    @property
    def kda_layers(self) -> tuple[int, ...]:
        """The layers that are not MLA."""
        return tuple(layer for layer in range(self.num_layers) if layer not in self.mla_layers)

    @property
    def moe_layers(self) -> range:
        """The layers that have experts."""
        return range(self.num_dense_layers, self.num_layers)

    @property
    def num_blocks(self) -> int:
        """Blocks of Attention Residuals; 0 without them."""
        return 0 if self.attnres_block is None else -(-self.num_layers // self.attnres_block)

    @property
    def kda_width(self) -> int:
        """P: channels of one KDA projection, heads * head dimension."""
        return self.kda_num_heads * self.kda_head_dim

    @property
    def query_dim(self) -> int:
        """Q: one MLA query head, the nope and the (unrotated) rope part."""
        return self.nope_dim + self.rope_dim

    @property
    def latent_row(self) -> int:
        """M: values of one cached position of one MLA layer, latent and shared part."""
        return self.kv_lora_rank + self.rope_dim

    @property
    def mla_value_width(self) -> int:
        """Width of an MLA layer's attention output, heads * value dimension."""
        return self.num_heads * self.value_dim

    @property
    def expert_input(self) -> int:
        """Z: what a routed expert reads and gives, the latent width or the hidden size."""
        return self.hidden_size if self.latent_width is None else self.latent_width

    @property
    def shared_width(self) -> int:
        """Hidden width of the shared experts, which are stored fused into one."""
        return self.num_shared_experts * self.expert_width


def read_config(directory: Path) -> ModelConfig:
    """The architecture of the checkpoint in `directory`. Raises ConfigError."""
    source = Path(directory) / "config.json"
    return parse_config(read_json_object(source), source=source)


def parse_config(raw: Mapping[str, Any], *, source: Path) -> ModelConfig:
    """The architecture that a released config.json states; `source` is only for messages.

    Raises ConfigError naming the file, the section and the field.
    """
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{source.name} does not hold a JSON object.", evidence=[("file", str(source))])
    model_type = raw.get("model_type")
    if model_type == "kimi_linear":
        return _parse_kimi_linear(raw, source=source)
    if model_type is None or model_type == "kimi_k3":
        return _parse_k3(raw, source=source)
    known = ["kimi_k3", "kimi_linear"]
    near = difflib.get_close_matches(str(model_type), known, n=1, cutoff=0.0)
    raise ConfigError(
        f"'model_type' in {source.name} is {model_type!r}; only 'kimi_k3' and 'kimi_linear' can be run.",
        evidence=[("file", str(source)), ("section", "top level"), ("nearest known name", near[0])],
    )


def read_json_object(source: Path) -> dict[str, Any]:
    """A small JSON file whose top is an object, with every key once and no NaN. Raises ConfigError."""
    rows = [("file", str(source))]
    try:
        size = source.stat().st_size
        if size > _MAX_FILE_BYTES:
            raise ConfigError(
                f"{source.name} has {size:,} bytes; at most {_MAX_FILE_BYTES:,}.", evidence=rows
            )
        data = source.read_bytes()
    except FileNotFoundError:
        raise ConfigError(
            f"There is no {source.name} in {source.parent}.",
            evidence=rows,
            remedies=["MODEL is the directory of a checkpoint:  config.json and *.safetensors"],
        ) from None
    except OSError as error:
        raise ConfigError(f"{source.name} can't be read: {error.strerror}.", evidence=rows) from None
    try:
        value = json.loads(data, object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{source.name} is not valid JSON: {error}.",
            evidence=[*rows, ("size", f"{len(data):,} bytes")],
            remedies=["If the file was edited or cut short, fetch it again."],
        ) from None
    if not isinstance(value, dict):
        raise ConfigError(f"{source.name} does not hold a JSON object.", evidence=rows)
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the field '{key}' appears twice")
        found[key] = value
    return found


def _no_constant(word: str) -> Any:
    raise ValueError(f"{word} is not a JSON number")


def _parse_k3(raw: Mapping[str, Any], *, source: Path) -> ModelConfig:
    check_section(raw, fields.K3_TOP, source=source)
    text = raw["text_config"]
    check_section(text, fields.K3_TEXT, source=source)
    linear = text["linear_attn_config"]
    check_section(linear, fields.K3_LINEAR_ATTENTION, source=source)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if name in raw and raw[name] != text[name]:
            fault = f"must be the same as in text_config ({text[name]})"
            raise wrong_value(name, raw[name], fault, section="", source=source)
    if text["latent_moe_use_norm"] != (text["routed_expert_hidden_size"] is not None):
        fault = "must be true exactly when routed_expert_hidden_size is set: no other form was released"
        raise wrong_value(
            "latent_moe_use_norm", text["latent_moe_use_norm"], fault, section="text_config", source=source
        )
    _check_together(text, linear, section="text_config", source=source)
    linear_beta = text["activation_situ_linear_beta"]
    return ModelConfig(
        family="kimi-k3",
        **_shared_fields(text, linear),
        mla_output_gate=text["mla_use_output_gate"],
        gate_lower_bound=None if linear["gate_lower_bound"] is None else float(linear["gate_lower_bound"]),
        full_rank_gate=linear["use_full_rank_gate"],
        latent_width=text["routed_expert_hidden_size"],
        latent_norm=text["latent_moe_use_norm"],
        activation=text["hidden_act"],
        situ_beta=float(text["activation_situ_beta"]),
        situ_linear_beta=None if linear_beta is None else float(linear_beta),
        attnres_block=text["attn_res_block_size"],
    )


def _parse_kimi_linear(raw: Mapping[str, Any], *, source: Path) -> ModelConfig:
    check_section(raw, fields.KIMI_LINEAR_TOP, source=source)
    linear = raw["linear_attn_config"]
    check_section(linear, fields.KIMI_LINEAR_ATTENTION, source=source)
    _check_together(raw, linear, section="", source=source)
    _check_repeated(raw, linear, source=source)
    return ModelConfig(
        family="kimi-linear",
        **_shared_fields(raw, linear),
        mla_output_gate=False,
        gate_lower_bound=None,
        full_rank_gate=False,
        latent_width=None,
        latent_norm=False,
        activation="silu",
        situ_beta=1.0,
        situ_linear_beta=None,
        attnres_block=None,
    )


def _shared_fields(text: Mapping[str, Any], linear: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that both layouts state under the same names."""
    return {
        "num_layers": text["num_hidden_layers"],
        "hidden_size": text["hidden_size"],
        "vocab_size": text["vocab_size"],
        "dense_width": text["intermediate_size"],
        "num_dense_layers": text["first_k_dense_replace"],
        "num_heads": text["num_attention_heads"],
        "q_lora_rank": text["q_lora_rank"],
        "kv_lora_rank": text["kv_lora_rank"],
        "nope_dim": text["qk_nope_head_dim"],
        "rope_dim": text["qk_rope_head_dim"],
        "value_dim": text["v_head_dim"],
        "kda_num_heads": linear["num_heads"],
        "kda_head_dim": linear["head_dim"],
        "conv_width": linear["short_conv_kernel_size"],
        "num_experts": text["num_experts"],
        "experts_per_token": text["num_experts_per_token"],
        "num_shared_experts": text["num_shared_experts"],
        "expert_width": text["moe_intermediate_size"],
        "renormalize": text["moe_renormalize"],
        "routed_scaling": float(text["routed_scaling_factor"]),
        "eps": float(text["rms_norm_eps"]),
        "mla_layers": tuple(sorted(number - 1 for number in linear["full_attn_layers"])),
        "bos_id": text["bos_token_id"],
        "eos_id": text["eos_token_id"],
        "pad_id": text["pad_token_id"],
    }


def _check_together(
    text: Mapping[str, Any], linear: Mapping[str, Any], *, section: str, source: Path
) -> None:
    """Fields that must fit one another."""
    layers = text["num_hidden_layers"]
    vocab = text["vocab_size"]
    faults = [
        ("num_key_value_heads", text["num_key_value_heads"] != text["num_attention_heads"],
         f"must equal num_attention_heads ({text['num_attention_heads']})"),
        ("v_head_dim", text["v_head_dim"] > text["qk_nope_head_dim"] + text["qk_rope_head_dim"],
         "must not be wider than a query head"),
        ("num_experts_per_token", text["num_experts_per_token"] > text["num_experts"],
         f"must not exceed num_experts ({text['num_experts']})"),
        ("first_k_dense_replace", text["first_k_dense_replace"] >= layers,
         f"must leave at least one of {layers} layers with experts"),
    ]  # fmt: skip
    faults += [
        (name, text[name] is not None and text[name] >= vocab, f"must be below vocab_size ({vocab})")
        for name in ("bos_token_id", "eos_token_id", "pad_token_id")
    ]
    for name, wrong, fault in faults:
        if wrong:
            raise wrong_value(name, text[name], fault, section=section, source=source)
    _check_partition(linear, layers, section=section, source=source)


def _check_partition(linear: Mapping[str, Any], layers: int, *, section: str, source: Path) -> None:
    """kda_layers and full_attn_layers together must name every layer from 1 to `layers` once."""
    numbers = [*linear["full_attn_layers"], *linear["kda_layers"]]
    wanted = set(range(1, layers + 1))
    evidence = [("file", str(source)), ("section", f"{section}.linear_attn_config".lstrip("."))]
    trouble = [
        ("in neither", sorted(wanted - set(numbers))),
        ("twice", sorted({n for n in numbers if numbers.count(n) > 1})),
        (f"not in 1..{layers}", sorted(set(numbers) - wanted)),
    ]
    if not any(found for _, found in trouble):
        return
    evidence += [(f"layers {what}", ", ".join(map(str, found[:8]))) for what, found in trouble if found]
    raise ConfigError(
        f"'kda_layers' and 'full_attn_layers' in {source.name} don't share out layers 1 to {layers}.",
        evidence=evidence,
        remedies=["Each layer, counted from 1, must be in exactly one of the two lists."],
    )


def _check_repeated(raw: Mapping[str, Any], linear: Mapping[str, Any], *, source: Path) -> None:
    """What transformers states a second time must say the same."""
    full = set(linear["full_attn_layers"])
    layers = raw["num_hidden_layers"]
    dense = raw["first_k_dense_replace"]
    repeats: dict[str, Any] = {
        "layer_types": ["full_attention" if n in full else "linear_attention" for n in range(1, layers + 1)],
        "mlp_layer_types": ["dense" if i < dense else "sparse" for i in range(layers)],
        "linear_conv_kernel_dim": linear["short_conv_kernel_size"],
        "linear_head_dim": linear["head_dim"],
        "linear_num_heads": linear["num_heads"],
    }
    for name, wanted in repeats.items():
        if raw.get(name) is not None and raw[name] != wanted:
            fault = "must say the same as linear_attn_config and first_k_dense_replace"
            raise wrong_value(name, raw[name], fault, section="", source=source)
