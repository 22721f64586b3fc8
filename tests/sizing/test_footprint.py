"""Golden arithmetic of both releases, to the byte (specification of the checkpoint, part 11)."""

from __future__ import annotations

from pathlib import Path

import pytest

from twoends.checkpoint.config import read_config
from twoends.checkpoint.predicted import predicted_index
from twoends.checkpoint.presets import preset_config
from twoends.checkpoint.tiny import write_tiny
from twoends.errors import ConfigError, OptionError
from twoends.model.state import cache_bytes_per_token, recurrent_bytes
from twoends.sizing.footprint import OUR_VALUE_BYTES, bytes_by_format, footprint
from twoends.sizing.models import load_model

SHARED = Path(__file__).parents[3] / "shared" / "data"

K3 = {
    "parameters": 2_779_931_837_184,
    "active_parameters": 104_189_614_848,
    "num_bytes": 1_560_860_324_864,
    "trunk_parameters": 54_394_816_256,
    "trunk_bytes": 108_811_877_376,
    "num_experts": 82_432,
    "expert_parameters": 33_030_144,
    "expert_bytes": 17_547_264,
    "routed_bytes": 1_446_456_066_048,
    "routed_bytes_per_token": 25_829_572_608,
    "bytes_per_token": 134_641_449_984,
    "state_values": 108_527_616,
    "cache_bytes_per_layer": 1_152,
    "cache_bytes_per_token": 27_648,
}
KIMI_LINEAR = {
    "parameters": 49_122_681_728,
    "active_parameters": 3_106_972_544,
    "num_bytes": 98_245_528_576,
    "expert_bytes": 14_155_776,
    "state_values": 10_485_760,
    "cache_bytes_per_token": 8_064,
}


@pytest.mark.parametrize("name", K3)
def test_every_golden_figure_of_k3_to_the_byte(k3, name):
    assert getattr(k3, name) == K3[name]


@pytest.mark.parametrize("name", KIMI_LINEAR)
def test_every_golden_figure_of_kimi_linear_to_the_byte(kimi_linear, name):
    assert getattr(kimi_linear, name) == KIMI_LINEAR[name]


def test_the_state_of_k3_is_a_fifth_of_a_gibibyte(k3):
    assert 2 * k3.state_values == 217_055_232
    assert f"{2 * k3.state_values / 2**30:.3f}" == "0.202"
    assert f"{4 * k3.state_values / 2**30:.4f}" == "0.4043"


def test_the_cache_of_k3_at_a_million_tokens(k3):
    assert k3.cache_bytes_per_token * 1_048_576 == 28_991_029_248


def test_embedding_head_and_norms_of_k3(k3):
    assert (k3.top.parameters, k3.top.num_bytes) == (2_348_831_744, 4_697_663_488)


def test_the_vision_side_of_k3(k3):
    # tower 401,214,464 and projector 46,144,512; their two files' payloads are the bytes
    assert k3.model.vision_parameters == 401_214_464 + 46_144_512
    assert k3.parts[-1].num_bytes == 802_428_928 + 92_289_024
    assert k3.parameters - k3.model.vision_parameters == 2_779_484_478_208


def test_the_formats_of_k3_add_up_to_the_census_of_the_release(k3):
    census = {"MXFP4": 1_446_456_066_048, "BF16": 2 * 57_179_884_544, "F32": 4 * 11_122_432}
    assert dict(bytes_by_format(k3.parts)) == census


@pytest.mark.parametrize(
    ("layer_kind", "parameters"), [("KDA attention", 69 * 443_740_416), ("MLA attention", 24 * 232_196_096)]
)
def test_attention_of_k3_by_kind(k3, layer_kind, parameters):
    assert next(part.parameters for part in k3.parts if part.name == layer_kind) == parameters


def test_a_full_attention_model_of_the_same_depth_needs_more(k3):
    assert k3.all_latent_bytes_per_token == 93 * 1_152
    # keys and values of 96 heads of 128, two bytes each, in 93 layers
    assert k3.all_heads_bytes_per_token == 93 * 2 * 96 * 256


@pytest.mark.parametrize("name", ["kimi-k3", "kimi-linear"])
def test_parts_add_up_to_the_payload_of_the_predicted_files(name):
    foot = footprint(load_model(name))
    index = predicted_index(Path("nowhere"), foot.model.config)
    assert foot.text_bytes == index.tables.payload_bytes


@pytest.mark.parametrize("family", ["kimi-k3", "kimi-linear"])
def test_a_written_checkpoint_has_the_bytes_that_its_config_says(tmp_path, family):
    write_tiny(tmp_path / "nano", preset="nano", family=family)
    foot = footprint(load_model(str(tmp_path / "nano")))
    config = preset_config("nano", family=family)
    assert foot.model.release is None
    assert foot.text_bytes == predicted_index(tmp_path, config).tables.payload_bytes


@pytest.mark.parametrize("context", [1, 4096])
def test_a_sequence_here_carries_what_the_engine_holds(k3, context):
    config = k3.model.config
    held = recurrent_bytes(config) + context * cache_bytes_per_token(config)
    assert k3.sequence_bytes(context, value_bytes=OUR_VALUE_BYTES) == held


@pytest.mark.skipif(not SHARED.is_dir(), reason="the released configs are not beside the repository")
@pytest.mark.parametrize("name", ["kimi-k3", "kimi-linear"])
def test_the_configs_that_come_along_are_the_released_ones(name):
    assert load_model(name).config == read_config(SHARED / name)


@pytest.mark.skipif(not SHARED.is_dir(), reason="the released configs are not beside the repository")
@pytest.mark.parametrize("name", ["kimi-k3", "kimi-linear"])
def test_a_released_config_in_a_directory_gives_the_same_footprint(name):
    here, there = footprint(load_model(name)), footprint(load_model(str(SHARED / name)))
    assert (here.parameters, here.num_bytes) == (there.parameters, there.num_bytes)
    assert there.model.release == name


def test_an_unknown_model_is_told_the_nearest_name():
    with pytest.raises(OptionError, match=r"neither a released model nor a directory[\s\S]*kimi-k3"):
        load_model("kimi-k33")


def test_a_directory_without_a_config_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no config\.json"):
        load_model(str(tmp_path))
