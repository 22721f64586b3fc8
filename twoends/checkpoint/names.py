"""The only file that knows the checkpoint's tensor names: our short names -> file names, shapes, dtypes.

Matrices are [out, in] as in the file. Short names are the same for both families; which of them a
layer has follows from the config. Released dtypes are what the writers write; what a reader
accepts is wider: F32 or BF16 for any vector or matrix (F32 stays F32), U8 for packed experts.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Literal

from twoends.checkpoint.config import ModelConfig

DType = Literal["F32", "BF16", "U8"]
ExpertFormat = Literal["mxfp4", "bf16", "f32"]

DTYPE_BYTES: dict[str, int] = {"F32": 4, "BF16": 2, "U8": 1}
# The released names of what this program does not run; a checkpoint may have them.
VISION_PREFIXES = ("vision_tower.", "mm_projector.")

_FLOATS: tuple[DType, ...] = ("BF16", "F32")
_LAYER_NUMBER = re.compile(r"(?:^|\.)layers\.(\d{1,7})\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One tensor that a config demands. `released` is its dtype in the family's release."""

    short: str
    file_name: str
    shape: tuple[int, ...]
    released: DType

    @property
    def nbytes(self) -> int:
        """Bytes at the released dtype."""
        return num_values(self.shape) * DTYPE_BYTES[self.released]


def num_values(shape: tuple[int, ...]) -> int:
    """Product of the dimensions."""
    product = 1
    for dim in shape:
        product *= dim
    return product


def text_prefix(config: ModelConfig) -> str:
    """What the names of the text model start with."""
    return "language_model.model." if config.family == "kimi-k3" else "model."


def layer_of(file_name: str) -> int | None:
    """The layer that a tensor belongs to, read from its name; None outside the layers."""
    match = _LAYER_NUMBER.search(file_name)
    return None if match is None or file_name.startswith(VISION_PREFIXES) else int(match.group(1))


def top_specs(config: ModelConfig) -> tuple[TensorSpec, ...]:
    """The tensors outside the layers: embedding, head, last norm, last Attention Residuals."""
    prefix = text_prefix(config)
    head = prefix.removesuffix("model.") + "lm_head.weight"
    table = [
        _row("embed", f"{prefix}embed_tokens.weight", config.vocab_size, config.hidden_size),
        _row("lm_head", head, config.vocab_size, config.hidden_size),
        _row("final_norm", f"{prefix}norm.weight", config.hidden_size),
    ]
    if config.attnres_block is not None:
        table += [
            _row("output_res_norm", f"{prefix}output_attn_res_norm.weight", config.hidden_size),
            _row("output_res_proj", f"{prefix}output_attn_res_proj.weight", 1, config.hidden_size),
        ]
    return tuple(table)


def layer_specs(config: ModelConfig, layer: int) -> tuple[TensorSpec, ...]:
    """Every tensor of one layer but its routed experts, in the order of use."""
    prefix = f"{text_prefix(config)}layers.{layer}."
    width = config.hidden_size
    table = [_row("input_norm", f"{prefix}input_layernorm.weight", width)]
    if config.attnres_block is not None:
        table += [
            _row("attn_res_norm", f"{prefix}self_attention_res_norm.weight", width),
            _row("attn_res_proj", f"{prefix}self_attention_res_proj.weight", 1, width),
        ]
    mixer = _mla_specs if config.is_mla(layer) else _kda_specs
    table += mixer(config, f"{prefix}self_attn.")
    table.append(_row("post_attn_norm", f"{prefix}post_attention_layernorm.weight", width))
    if config.attnres_block is not None:
        table += [
            _row("mlp_res_norm", f"{prefix}mlp_res_norm.weight", width),
            _row("mlp_res_proj", f"{prefix}mlp_res_proj.weight", 1, width),
        ]
    if config.is_moe(layer):
        return (*table, *_moe_specs(config, f"{prefix}block_sparse_moe."))
    return (*table, *_feed_forward(f"{prefix}mlp.", "", config.dense_width, width))


def is_matrix(short: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor is multiplied row by row, as rows of one run of bytes; the others are small."""
    return len(shape) == 2 and not short.endswith("_res_proj")


def layer_kind(config: ModelConfig, layer: int) -> tuple[bool, bool]:
    """(is MLA, has experts): layers of one kind have the same short names, shapes and dtypes."""
    return config.is_mla(layer), config.is_moe(layer)


@functools.lru_cache(maxsize=16)
def expert_parts(config: ModelConfig, expert_format: ExpertFormat) -> tuple[TensorSpec, ...]:
    """The tensors of one routed expert in our fixed order; `file_name` is what follows the prefix.

    mxfp4: w1 packed, w1 scale, w2 packed, w2 scale, w3 packed, w3 scale; else w1, w2, w3. w1 is the
    gate, w3 the up and w2 the down projection.
    """
    inner, outer = config.expert_width, config.expert_input
    parts: list[TensorSpec] = []
    for name, (rows, cols) in {"w1": (inner, outer), "w2": (outer, inner), "w3": (inner, outer)}.items():
        if expert_format == "mxfp4":
            parts.append(_row(f"{name}_packed", f"{name}.weight_packed", rows, cols // 2, dtype="U8"))
            parts.append(_row(f"{name}_scale", f"{name}.weight_scale", rows, cols // 32, dtype="U8"))
        else:
            dtype: DType = "F32" if expert_format == "f32" else "BF16"
            parts.append(_row(name, f"{name}.weight", rows, cols, dtype=dtype))
    return tuple(parts)


def expert_prefix(config: ModelConfig, layer: int, expert: int) -> str:
    """What the names of one routed expert's tensors start with."""
    return f"{text_prefix(config)}layers.{layer}.block_sparse_moe.experts.{expert}."


def expert_pattern(config: ModelConfig) -> re.Pattern[str]:
    """Matches a routed expert's tensor; groups: layer, expert, w1|w2|w3, what is stored."""
    number = r"(0|[1-9][0-9]{0,6})"
    prefix = re.escape(text_prefix(config))
    return re.compile(
        rf"{prefix}layers\.{number}\.block_sparse_moe\.experts\.{number}"
        r"\.(w[123])\.(weight|weight_packed|weight_scale)"
    )


def accepts_shape(spec: TensorSpec, shape: tuple[int, ...], config: ModelConfig) -> bool:
    """Whether a file may give this shape. Only a_log has freedom: it is padded, or has unit dimensions."""
    if spec.short != "a_log":
        return shape == spec.shape
    heads = shape if len(shape) == 1 else shape[2:3]
    plain = len(shape) == 1 or (len(shape) == 4 and shape[:2] == (1, 1) and shape[3] == 1)
    return plain and heads[0] >= config.kda_num_heads


def accepts_dtype(spec: TensorSpec, dtype: str) -> bool:
    """Whether a file may give this dtype: packed bytes are U8, all else is F32 or BF16."""
    return dtype == "U8" if spec.released == "U8" else dtype in _FLOATS


def _row(short: str, file_name: str, *shape: int, dtype: DType = "BF16") -> TensorSpec:
    return TensorSpec(short=short, file_name=file_name, shape=shape, released=dtype)


def _kda_specs(config: ModelConfig, prefix: str) -> list[TensorSpec]:
    width, inner, head = config.hidden_size, config.kda_width, config.kda_head_dim
    heads = config.kda_num_heads
    # The K3 release keeps these small tensors in F32; Kimi-Linear's only a_log and dt_bias.
    small: DType = "F32" if config.family == "kimi-k3" else "BF16"
    a_log_shape = (max(head, heads),) if config.family == "kimi-k3" else (1, 1, heads, 1)
    table = [_row(f"{x}_proj", f"{prefix}{x}_proj.weight", inner, width) for x in "qkv"]
    table += [
        _row(f"{x}_conv", f"{prefix}{x}_conv1d.weight", inner, 1, config.conv_width, dtype=small)
        for x in "qkv"
    ]
    table += [
        _row("f_a_proj", f"{prefix}f_a_proj.weight", head, width),
        _row("f_b_proj", f"{prefix}f_b_proj.weight", inner, head),
        _row("a_log", f"{prefix}A_log", *a_log_shape, dtype="F32"),
        _row("dt_bias", f"{prefix}dt_bias", inner, dtype="F32"),
        _row("b_proj", f"{prefix}b_proj.weight", heads, width),
    ]
    if config.full_rank_gate:
        table.append(_row("g_proj", f"{prefix}g_proj.weight", inner, width))
    else:
        table += [
            _row("g_a_proj", f"{prefix}g_a_proj.weight", head, width),
            _row("g_b_proj", f"{prefix}g_b_proj.weight", inner, head),
        ]
    return [
        *table,
        _row("o_norm", f"{prefix}o_norm.weight", head, dtype=small),
        _row("o_proj", f"{prefix}o_proj.weight", width, inner),
    ]


def _mla_specs(config: ModelConfig, prefix: str) -> list[TensorSpec]:
    width, rank = config.hidden_size, config.kv_lora_rank
    expanded = config.num_heads * (config.nope_dim + config.value_dim)
    queries = config.num_heads * config.query_dim
    if config.q_lora_rank is None:
        table = [_row("q_proj", f"{prefix}q_proj.weight", queries, width)]
    else:
        table = [
            _row("q_a_proj", f"{prefix}q_a_proj.weight", config.q_lora_rank, width),
            _row("q_a_norm", f"{prefix}q_a_layernorm.weight", config.q_lora_rank),
            _row("q_b_proj", f"{prefix}q_b_proj.weight", queries, config.q_lora_rank),
        ]
    table += [
        _row("kv_a_proj", f"{prefix}kv_a_proj_with_mqa.weight", config.latent_row, width),
        _row("kv_a_norm", f"{prefix}kv_a_layernorm.weight", rank),
        _row("kv_b_proj", f"{prefix}kv_b_proj.weight", expanded, rank),
    ]
    if config.mla_output_gate:
        table.append(_row("g_proj", f"{prefix}g_proj.weight", config.mla_value_width, width))
    return [*table, _row("o_proj", f"{prefix}o_proj.weight", width, config.mla_value_width)]


def _moe_specs(config: ModelConfig, prefix: str) -> list[TensorSpec]:
    width = config.hidden_size
    bias: DType = "F32" if config.family == "kimi-k3" else "BF16"
    table = [
        _row("router", f"{prefix}gate.weight", config.num_experts, width),
        _row("router_bias", f"{prefix}gate.e_score_correction_bias", config.num_experts, dtype=bias),
    ]
    if config.latent_width is not None:
        latent = config.latent_width
        table += [
            _row("latent_down", f"{prefix}routed_expert_down_proj.weight", latent, width),
            _row("latent_norm", f"{prefix}routed_expert_norm.weight", latent),
            _row("latent_up", f"{prefix}routed_expert_up_proj.weight", width, latent),
        ]
    return table + _feed_forward(f"{prefix}shared_experts.", "shared_", config.shared_width, width)


def _feed_forward(prefix: str, short: str, inner: int, outer: int) -> list[TensorSpec]:
    """Gate, up and down; the dense layer's short names end in _proj, the shared experts' don't."""
    ending = "" if short else "_proj"
    return [
        _row(f"{short}gate{ending}", f"{prefix}gate_proj.weight", inner, outer),
        _row(f"{short}up{ending}", f"{prefix}up_proj.weight", inner, outer),
        _row(f"{short}down{ending}", f"{prefix}down_proj.weight", outer, inner),
    ]
