"""config.json: the two released files are read, everything doubtful is refused by name."""

from __future__ import annotations

import contextlib
import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twoends.checkpoint import config_fields
from twoends.checkpoint.config import ModelConfig, parse_config, read_config
from twoends.checkpoint.config_fields import Section
from twoends.checkpoint.config_write import config_object, config_text
from twoends.checkpoint.presets import preset_config
from twoends.errors import ConfigError

SOURCE = Path("/models/k3/config.json")
K3_SECTIONS = {
    (): config_fields.K3_TOP,
    ("text_config",): config_fields.K3_TEXT,
    ("text_config", "linear_attn_config"): config_fields.K3_LINEAR_ATTENTION,
}
KIMI_LINEAR_SECTIONS = {
    (): config_fields.KIMI_LINEAR_TOP,
    ("linear_attn_config",): config_fields.KIMI_LINEAR_ATTENTION,
}


def needed_fields(sections: dict[tuple[str, ...], Section]) -> list[Any]:
    return [
        pytest.param(place, name, id=".".join([*place, name]))
        for place, table in sections.items()
        for name in table.needed
    ]


def within(raw: dict[str, Any], place: tuple[str, ...]) -> dict[str, Any]:
    for step in place:
        raw = raw[step]
    return raw


def k3() -> dict[str, Any]:
    return config_object(preset_config("nano"), expert_format="mxfp4")


def kimi_linear() -> dict[str, Any]:
    return config_object(preset_config("nano", family="kimi-linear"), expert_format="bf16")


def refusal(raw: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(raw, source=SOURCE)
    return str(caught.value)


def test_the_released_k3_config_is_read(shared_data: Path) -> None:
    config = read_config(shared_data / "kimi-k3")
    assert (config.family, config.num_layers, config.hidden_size) == ("kimi-k3", 93, 7168)
    assert config.mla_layers == (*range(3, 92, 4), 92)
    assert (config.kda_width, config.latent_row, config.expert_input) == (12288, 576, 3584)
    assert (config.shared_width, config.num_blocks, config.gate_lower_bound) == (6144, 8, -5.0)
    assert (config.eps, config.latent_eps, config.eos_id) == (1e-5, 1e-6, 163586)
    assert [layer for layer in range(93) if config.starts_block(layer)] == list(range(0, 93, 12))
    assert not config.is_moe(0)
    assert config.moe_layers == range(1, 93)


def test_the_released_kimi_linear_config_is_read(shared_data: Path) -> None:
    config = read_config(shared_data / "kimi-linear")
    assert (config.family, config.num_layers, config.q_lora_rank) == ("kimi-linear", 27, None)
    assert config.mla_layers == (3, 7, 11, 15, 19, 23, 26)
    assert (config.latent_width, config.attnres_block, config.gate_lower_bound) == (None, None, None)
    assert (config.expert_input, config.activation, config.routed_scaling) == (2304, "silu", 2.446)


@pytest.mark.parametrize("name", ["kimi-k3", "kimi-linear"])
def test_a_config_survives_being_written_and_read(shared_data: Path, name: str) -> None:
    config = read_config(shared_data / name)
    text = config_text(config, expert_format="mxfp4")
    assert parse_config(json.loads(text), source=SOURCE) == config


def test_what_transformers_adds_on_saving_is_known(kimi_linear_raw: dict[str, Any]) -> None:
    full = kimi_linear_raw["linear_attn_config"]["full_attn_layers"]
    saved = kimi_linear_raw | {
        "attention_bias": False, "attention_dropout": 0.0, "linear_conv_kernel_dim": 4,
        "linear_head_dim": 128, "linear_num_heads": 32, "output_router_logits": False,
        "pretraining_tp": 1, "qk_head_dim": 192,
        "layer_types": ["full_attention" if n in full else "linear_attention" for n in range(1, 28)],
        "mlp_layer_types": ["dense"] + ["sparse"] * 26, "transformers_version": "5.24.0",
    }  # fmt: skip
    assert parse_config(saved, source=SOURCE) == parse_config(kimi_linear_raw, source=SOURCE)
    saved["layer_types"][3] = "linear_attention"
    assert "'layer_types'" in refusal(saved)


@pytest.mark.parametrize(("place", "name"), needed_fields(K3_SECTIONS))
def test_a_missing_field_of_k3_is_named_with_its_section(place: tuple[str, ...], name: str) -> None:
    raw = k3()
    del within(raw, place)[name]
    table = K3_SECTIONS[place]
    text = refusal(raw)
    assert text.startswith(f"config.json has no '{name}', so this can't be run as Kimi K3.")
    where = ".".join(place) or "top level"
    assert f"{where} ({len(table.needed) - 1} of {len(table.needed)} fields found)" in text
    assert str(SOURCE) in text


@pytest.mark.parametrize(("place", "name"), needed_fields(KIMI_LINEAR_SECTIONS))
def test_a_missing_field_of_kimi_linear_is_named(place: tuple[str, ...], name: str) -> None:
    raw = kimi_linear()
    del within(raw, place)[name]
    assert refusal(raw).startswith(f"config.json has no '{name}'")


@pytest.mark.parametrize("place", K3_SECTIONS, ids=lambda p: ".".join(p) or "top")
@pytest.mark.parametrize("name", ["gate_upper_bound", "num_expert", "zzz"])
def test_an_unknown_field_is_named(place: tuple[str, ...], name: str) -> None:
    raw = k3()
    within(raw, place)[name] = 1
    assert refusal(raw).startswith(f"config.json has a field '{name}' that Kimi K3 does not have.")


def test_an_unknown_field_comes_with_the_nearest_known_name() -> None:
    raw = k3()
    raw["text_config"]["num_expert"] = 14
    assert "nearest known name   num_experts" in refusal(raw)


def test_k3_fields_in_the_flat_layout_are_not_passed_over() -> None:
    assert "'attn_res_block_size'" in refusal(kimi_linear() | {"attn_res_block_size": 12})


@pytest.mark.parametrize("value", [0, -1, 2**40, 3.0, True, "8", None, math.nan, [8]], ids=repr)
@pytest.mark.parametrize("name", ["hidden_size", "num_hidden_layers", "num_experts", "vocab_size"])
def test_a_count_that_can_not_be_is_refused(name: str, value: Any) -> None:
    raw = k3()
    raw["text_config"][name] = value
    assert f"'{name}' in config.json is" in refusal(raw)


@pytest.mark.parametrize("value", [0.0, -1e-5, math.nan, math.inf, 1.0, True, "1e-5", None], ids=repr)
def test_an_epsilon_that_can_not_be_is_refused(value: Any) -> None:
    raw = k3()
    raw["text_config"]["rms_norm_eps"] = value
    assert "'rms_norm_eps'" in refusal(raw)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("topk_group", 2, "experts are chosen from one group"),
        ("num_expert_group", 8, "experts are chosen from one group"),
        ("tie_word_embeddings", True, "the head has its own matrix"),
        ("rope_scaling", {"type": "yarn"}, "no rotations to scale"),
        ("mla_use_nope", False, "no rotation of positions is implemented"),
        ("moe_layer_freq", 2, "every layer after the dense ones"),
        ("hidden_act", "gelu", "'situ' or 'silu'"),
        ("num_nextn_predict_layers", 1, "prediction layers are not run"),
        ("num_key_value_heads", 1, "must equal num_attention_heads (3)"),
        ("v_head_dim", 64, "must not be wider than a query head"),
        ("moe_router_activation_func", "softmax", "the router's scores are sigmoids"),
        ("topk_method", "greedy", "experts are chosen by biased score"),
        ("latent_moe_use_norm", False, "must be true exactly when routed_expert_hidden_size is set"),
        ("num_experts_per_token", 15, "must not exceed num_experts (14)"),
        ("first_k_dense_replace", 9, "must leave at least one of 9 layers with experts"),
        ("eos_token_id", 768, "must be below vocab_size (768)"),
        ("attention_bias", True, "no projection of this family has a bias"),
        ("quantization_config", {"quant_method": "fp8"}, "no other format is decoded"),
    ],
)
def test_what_is_not_supported_is_refused_with_the_reason(name: str, value: Any, reason: str) -> None:
    raw = k3()
    raw["text_config"][name] = value
    if name == "eos_token_id":
        raw[name] = value
    text = refusal(raw)
    assert f"'{name}' in config.json is" in text
    assert reason in text


@pytest.mark.parametrize(
    ("full", "kda", "evidence"),
    [
        ([4, 8, 9], [1, 2, 3, 5, 6], "layers in neither   7"),
        ([4, 8, 9, 7], [1, 2, 3, 5, 6, 7], "layers twice   7"),
        ([4, 8, 9, 10], [1, 2, 3, 5, 6, 7], "layers not in 1..9   10"),
        ([4, 8, 9], [0, 1, 2, 3, 5, 6, 7], "layers not in 1..9   0"),
        ([3, 7, 8], [0, 1, 2, 4, 5, 6], "layers in neither    9"),
    ],
    ids=["missing", "twice", "too large", "zero", "counted from zero"],
)
def test_layer_lists_must_share_out_all_layers(full: list[int], kda: list[int], evidence: str) -> None:
    raw = k3()
    raw["text_config"]["linear_attn_config"] |= {"full_attn_layers": full, "kda_layers": kda}
    text = refusal(raw)
    assert "don't share out layers 1 to 9" in text
    assert " ".join(evidence.split()) in " ".join(text.split())


def test_token_ids_must_agree_between_the_sections() -> None:
    assert "must be the same as in text_config" in refusal(k3() | {"eos_token_id": 3})


def test_another_model_type_is_refused_with_the_nearest() -> None:
    assert "nearest known name   kimi_k3" in refusal(k3() | {"model_type": "kimi_k25"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not valid JSON"),
        ('{"model_type": "kimi_k3"', "is not valid JSON"),
        ('{"a": 1, "a": 2}', "the field 'a' appears twice"),
        ('{"a": NaN}', "NaN is not a JSON number"),
        ("[1]", "does not hold a JSON object"),
        ("[" * 100_000, "is not valid JSON"),
        ("\x00\x01", "is not valid JSON"),
    ],
    ids=["empty", "cut", "twice", "nan", "list", "deep", "binary"],
)
def test_a_file_that_is_not_such_json_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_config(tmp_path)


def test_a_directory_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"There is no config\.json in"):
        read_config(tmp_path)


def test_the_digest_tells_architectures_apart_and_ignores_token_ids() -> None:
    base = preset_config("nano")
    other_raw = k3()
    for section in (other_raw, other_raw["text_config"]):
        section["eos_token_id"] = 7
    assert parse_config(other_raw, source=SOURCE).digest == base.digest
    deeper = preset_config("nano", num_layers=10)
    digests = {base.digest, deeper.digest, base.with_latent_eps(1e-5).digest}
    assert len(digests) == 3


@pytest.mark.parametrize("bad", [0.0, 1.0, -1e-6, math.nan])
def test_a_latent_epsilon_out_of_range_is_refused(bad: float) -> None:
    with pytest.raises(ConfigError, match="latent epsilon"):
        preset_config("nano").with_latent_eps(bad)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=300)
@given(data=st.data(), value=json_values)
def test_any_value_in_any_field_gives_a_config_or_a_config_error(data: st.DataObject, value: Any) -> None:
    raw = copy.deepcopy(data.draw(st.sampled_from([k3(), kimi_linear()])))
    sections = K3_SECTIONS if raw["model_type"] == "kimi_k3" else KIMI_LINEAR_SECTIONS
    place = data.draw(st.sampled_from(sorted(sections)))
    name = data.draw(st.sampled_from(sections[place].known()))
    within(raw, place)[name] = value
    with contextlib.suppress(ConfigError):
        assert isinstance(parse_config(raw, source=SOURCE), ModelConfig)
