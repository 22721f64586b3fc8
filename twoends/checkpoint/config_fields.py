"""The fields of config.json, section by section: which are needed, which are known and change nothing.

A field is one of three kinds. `needed`: part of the architecture, must be there, each with a check
of its value. `checked`: may be absent, but if it is there it must hold what this program does.
`inert`: written by the release or by transformers' save_pretrained, read by nobody. Anything else is
unknown, and an unknown field is an error: it may change the mathematics.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twoends.errors import ConfigError

# A check gives None, or what is wrong with the value ("must be ...").
Check = Callable[[Any], str | None]

_MAX_COUNT = 1 << 24
_MAX_LAYERS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One JSON object of config.json; `title` is its dotted place, "" for the file itself."""

    title: str
    family_name: str
    needed: Mapping[str, Check]
    checked: Mapping[str, Check]
    inert: frozenset[str]

    def known(self) -> list[str]:
        """Every name that may appear here."""
        return sorted({*self.needed, *self.checked, *self.inert})


def count(low: int = 1, high: int = _MAX_COUNT) -> Check:
    """A whole number from `low` to `high`; true and false are not numbers."""

    def check(value: Any) -> str | None:
        if type(value) is not int:
            return "must be a whole number"
        return None if low <= value <= high else f"must be from {low:,} to {high:,}"

    return check


def number(low: float, high: float) -> Check:
    """A finite number above `low`, at most `high`."""

    def check(value: Any) -> str | None:
        if type(value) not in (int, float) or not math.isfinite(value):
            return "must be a finite number"
        return None if low < value <= high else f"must be above {low:g} and at most {high:g}"

    return check


def flag(value: Any) -> str | None:
    """true or false."""
    return None if isinstance(value, bool) else "must be true or false"


def section(value: Any) -> str | None:
    """A JSON object; its own table says what it holds."""
    return None if isinstance(value, dict) else "must be a section in braces"


def layer_list(value: Any) -> str | None:
    """A list of layer numbers, counted from 1 as the file does."""
    if not isinstance(value, list) or any(type(entry) is not int for entry in value):
        return "must be a list of whole numbers"
    return None


def one_of(*allowed: str) -> Check:
    """One of a few words."""
    words = " or ".join(f"'{word}'" for word in allowed)
    return lambda value: None if isinstance(value, str) and value in allowed else f"must be {words}"


def only(wanted: Any, reason: str) -> Check:
    """Exactly one value (and type); `reason` says why no other is supported."""

    def check(value: Any) -> str | None:
        same = type(value) is type(wanted) and value == wanted
        return None if same else f"must be {_json_word(wanted)}: {reason}"

    return check


def or_null(inner: Check) -> Check:
    """null, or what `inner` accepts."""

    def check(value: Any) -> str | None:
        fault = None if value is None else inner(value)
        return None if fault is None else f"{fault}, or null"

    return check


def mxfp4_quantization(value: Any) -> str | None:
    """The quantisation record: only the released format, whatever its ignore list claims."""
    if value is None:
        return None
    if not isinstance(value, dict):
        return "must be a section in braces"
    wanted = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}
    for key, word in wanted.items():
        if value.get(key) != word:
            return (
                f"must have {key} '{word}' (found {_json_word(value.get(key))}); no other format is decoded"
            )
    return None


def check_section(found: Mapping[str, Any], table: Section, *, source: Path) -> None:
    """Raises ConfigError for the first missing, unknown or wrong field of one section."""
    missing = [name for name in table.needed if name not in found]
    if missing:
        raise _missing(missing, found, table, source=source)
    unknown = sorted(set(found) - set(table.known()))
    if unknown:
        raise _unknown(unknown[0], table, source=source)
    for name, check in {**table.needed, **table.checked}.items():
        if name in found:
            fault = check(found[name])
            if fault is not None:
                raise wrong_value(name, found[name], fault, section=table.title, source=source)


def wrong_value(name: str, value: Any, fault: str, *, section: str, source: Path) -> ConfigError:
    """The error for a field that is there but can't be used; `fault` starts with "must be" or the like."""
    return ConfigError(
        f"'{name}' in {source.name} is {_json_word(value)}, but {fault}.",
        evidence=[("file", str(source)), ("section", section or "top level")],
        remedies=[
            "Nothing is assumed in its place: a model with a guessed value talks and is wrong.",
            "If the file was edited, fetch it again; compare with:  twoends inspect MODEL --config",
        ],
    )


def _missing(names: list[str], found: Mapping[str, Any], table: Section, *, source: Path) -> ConfigError:
    have = sum(name in found for name in table.needed)
    place = table.title or "top level"
    rows = [
        ("file", str(source)),
        ("section", f"{place} ({have} of {len(table.needed)} fields found)"),
    ]
    if len(names) > 1:
        rows.append(("missing", ", ".join(names)))
    return ConfigError(
        f"{source.name} has no '{names[0]}', so this can't be run as {table.family_name}.",
        evidence=rows,
        remedies=[
            "A default would give a model that talks and is wrong, so none is assumed.",
            "If the file was edited or cut short, fetch it again; compare with:",
            "    twoends inspect MODEL --config",
        ],
    )


def _unknown(name: str, table: Section, *, source: Path) -> ConfigError:
    near = difflib.get_close_matches(name, table.known(), n=1)
    rows = [("file", str(source)), ("section", table.title or "top level")]
    if near:
        rows.append(("nearest known name", near[0]))
    return ConfigError(
        f"{source.name} has a field '{name}' that {table.family_name} does not have.",
        evidence=rows,
        remedies=[
            "It may change what the model computes, so it is not passed over.",
            "Correct the name, or remove the field if you know that it does nothing.",
        ],
    )


def _json_word(value: Any) -> str:
    """A value as the file shows it, cut to one line."""
    words = {None: "null", True: "true", False: "false"}
    text = words[value] if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


# Names that transformers writes into any config; none of them reaches a tensor here.
_BOILERPLATE = frozenset(
    """
    _attn_implementation _name_or_path add_cross_attention architectures auto_map bad_words_ids
    begin_suppress_tokens bos_token_id chunk_size_feed_forward cross_attention_hidden_size
    decoder_start_token_id diversity_penalty do_sample dtype early_stopping
    encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty finetuning_task
    forced_bos_token_id forced_eos_token_id id2label initializer_range is_decoder
    is_encoder_decoder label2id length_penalty max_length max_position_embeddings min_length
    model_max_length no_repeat_ngram_size num_beam_groups num_beams num_return_sequences
    output_attentions output_hidden_states output_router_logits output_scores pad_token_id prefix
    pretraining_tp problem_type pruned_heads remove_invalid_values repetition_penalty return_dict
    return_dict_in_generate sep_token_id suppress_tokens task_specific_params temperature
    tf_legacy_loss tie_encoder_decoder tokenizer_class top_k top_p torch_dtype torchscript
    transformers_version typical_p use_bfloat16 use_cache
    attention_dropout head_dim qk_head_dim rope_parameters rope_theta
    """.split()  # noqa: SIM905 (seventy names read better as words)
)

_ONE_GROUP = "experts are chosen from one group"
_SHARED_MOE: dict[str, Check] = {
    "num_hidden_layers": count(high=_MAX_LAYERS),
    "hidden_size": count(),
    "vocab_size": count(),
    "intermediate_size": count(),
    "first_k_dense_replace": count(low=0, high=_MAX_LAYERS),
    "moe_layer_freq": only(1, "every layer after the dense ones has experts"),
    "num_attention_heads": count(high=65536),
    "num_key_value_heads": count(high=65536),
    "kv_lora_rank": count(),
    "qk_nope_head_dim": count(high=65536),
    "qk_rope_head_dim": count(high=65536),
    "v_head_dim": count(high=65536),
    "q_lora_rank": or_null(count()),
    "mla_use_nope": only(True, "no rotation of positions is implemented for this family"),
    "num_experts": count(high=65536),
    "num_experts_per_token": count(high=65536),
    "num_shared_experts": count(high=65536),
    "moe_intermediate_size": count(),
    "moe_renormalize": flag,
    "moe_router_activation_func": only("sigmoid", "the router's scores are sigmoids"),
    "num_expert_group": only(1, _ONE_GROUP),
    "topk_group": only(1, _ONE_GROUP),
    "use_grouped_topk": flag,
    "routed_scaling_factor": number(0.0, 1e4),
    "rms_norm_eps": number(0.0, 1e-1),
    "tie_word_embeddings": only(False, "the head has its own matrix in this family"),
    "num_nextn_predict_layers": only(0, "prediction layers are not run"),
    "bos_token_id": or_null(count(low=0)),
    "eos_token_id": or_null(count(low=0)),
    "pad_token_id": or_null(count(low=0)),
    "linear_attn_config": section,
}
_SHARED_CHECKED: dict[str, Check] = {
    "attention_bias": only(False, "no projection of this family has a bias"),
    "rope_scaling": only(None, "there are no rotations to scale"),
}
_LINEAR_ATTENTION: dict[str, Check] = {
    "full_attn_layers": layer_list,
    "kda_layers": layer_list,
    "num_heads": count(high=65536),
    "head_dim": count(high=65536),
    "short_conv_kernel_size": only(4, "the convolution kernels have four taps"),
}

_K3 = "Kimi K3"
_KIMI_LINEAR = "Kimi Linear"
_NOT_TIED = _SHARED_MOE["tie_word_embeddings"]

K3_TOP = Section(
    title="",
    family_name=_K3,
    needed={"model_type": only("kimi_k3", "that is this layout's name"), "text_config": section},
    checked={
        "tie_word_embeddings": _NOT_TIED,
        "quantization_config": mxfp4_quantization,
        "bos_token_id": or_null(count(low=0)),
        "eos_token_id": or_null(count(low=0)),
        "pad_token_id": or_null(count(low=0)),
    },
    inert=_BOILERPLATE | {"ignore_index", "image_placeholder", "media_placeholder_token_id", "vision_config"},
)
K3_TEXT = Section(
    title="text_config",
    family_name=_K3,
    needed={
        **_SHARED_MOE,
        "model_type": only("kimi_linear", "that is the text model's name in the release"),
        "mla_use_output_gate": flag,
        "hidden_act": one_of("situ", "silu"),
        "activation_situ_beta": number(0.0, 1e4),
        "activation_situ_linear_beta": or_null(number(0.0, 1e6)),
        "attn_res_block_size": or_null(count(high=_MAX_LAYERS)),
        "routed_expert_hidden_size": or_null(count()),
        "latent_moe_use_norm": flag,
        "topk_method": only("noaux_tc", "experts are chosen by biased score"),
    },
    checked={**_SHARED_CHECKED, "quantization_config": mxfp4_quantization},
    inert=_BOILERPLATE,
)
K3_LINEAR_ATTENTION = Section(
    title="text_config.linear_attn_config",
    family_name=_K3,
    needed={
        **_LINEAR_ATTENTION,
        "gate_lower_bound": or_null(number(-100.0, -1e-6)),
        "use_full_rank_gate": flag,
    },
    checked={},
    inert=frozenset(),
)
KIMI_LINEAR_TOP = Section(
    title="",
    family_name=_KIMI_LINEAR,
    needed={
        **_SHARED_MOE,
        "model_type": only("kimi_linear", "that is this layout's name"),
        "hidden_act": only("silu", "only SwiGLU experts exist in this layout"),
    },
    checked={
        **_SHARED_CHECKED,
        # transformers repeats linear_attn_config in fields of its own; config.py compares them.
        "layer_types": or_null(lambda value: None if isinstance(value, list) else "must be a list"),
        "mlp_layer_types": or_null(lambda value: None if isinstance(value, list) else "must be a list"),
        "linear_conv_kernel_dim": count(),
        "linear_head_dim": count(),
        "linear_num_heads": count(),
    },
    inert=_BOILERPLATE,
)
KIMI_LINEAR_ATTENTION = Section(
    title="linear_attn_config",
    family_name=_KIMI_LINEAR,
    needed=_LINEAR_ATTENTION,
    checked={},
    inert=frozenset(),
)
