"""The layout that we write is the released one, to the byte; nothing here writes weights."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from twoends.checkpoint import names
from twoends.checkpoint.config import ModelConfig, read_config
from twoends.checkpoint.layout import ShardPlan, TensorPlan, checkpoint_plans, plan_shard
from twoends.checkpoint.presets import preset_config


@pytest.fixture
def k3(shared_data: Path) -> ModelConfig:
    return read_config(shared_data / "kimi-k3")


def shard(config: ModelConfig, number: int) -> ShardPlan:
    return next(itertools.islice(checkpoint_plans(config, "mxfp4"), number - 1, None))


@pytest.mark.parametrize(
    ("number", "file_bytes", "header_bytes"),
    [(1, 2_341_216_112, 2_928), (2, 16_990_911_504, 818_704), (4, 16_567_501_776, 817_616)],
    ids=["dense KDA", "KDA", "MLA"],
)
def test_a_shard_has_the_published_size_and_header(
    k3: ModelConfig, number: int, file_bytes: int, header_bytes: int
) -> None:
    plan = shard(k3, number)
    assert (plan.file_bytes, len(plan.header)) == (file_bytes, header_bytes)
    assert int.from_bytes(plan.header[:8], "little") == header_bytes - 8
    assert plan.file_name == f"model-{number:05d}-of-000094.safetensors"


def test_expert_0_of_layer_1_lies_where_an_independent_reader_found_it(k3: ModelConfig) -> None:
    header = json.loads(shard(k3, 2).header[8:])
    run = [
        entry["data_offsets"]
        for name, entry in header.items()
        if name.startswith(names.expert_prefix(k3, 1, 0))
    ]
    assert min(begin for begin, _ in run) + 818_704 == 1_268_562_960
    assert max(end for _, end in run) + 818_704 == 1_286_110_224


def test_all_experts_follow_the_trunk_in_string_order(k3: ModelConfig) -> None:
    ordered = [tensor.name for tensor in shard(k3, 2).tensors]
    first = next(i for i, name in enumerate(ordered) if ".experts." in name)
    assert all(".experts." in name for name in ordered[first:])
    experts = list(dict.fromkeys(name.split(".experts.")[1].split(".")[0] for name in ordered[first:]))
    assert experts == sorted(map(str, range(896)))


def test_tensor_bytes_of_the_text_model_add_up_to_the_published_sum(k3: ModelConfig) -> None:
    trunk = sum(spec.nbytes for layer in range(93) for spec in names.layer_specs(k3, layer))
    top = sum(spec.nbytes for spec in names.top_specs(k3))
    expert = sum(part.nbytes for part in names.expert_parts(k3, "mxfp4"))
    assert (trunk, top, expert) == (108_811_877_376, 4_697_663_488, 17_547_264)
    vision = 92_289_024 + 802_428_928
    assert trunk + top + 92 * 896 * expert + vision == 1_560_860_324_864


def test_the_kimi_linear_release_has_its_published_size(shared_data: Path) -> None:
    plans = list(checkpoint_plans(read_config(shared_data / "kimi-linear"), "bf16"))
    assert len(plans) == 20
    assert sum(plan.file_bytes for plan in plans) == 98_248_224_120
    assert sum(plan.payload_bytes for plan in plans) == 98_245_528_576
    assert sum(len(plan.tensors) for plan in plans) == 20_493


@pytest.mark.parametrize(("preset", "gigabytes"), [("mini", 1.7), ("midi", 7.7)])
def test_presets_have_their_stated_size(preset: str, gigabytes: float) -> None:
    total = sum(plan.file_bytes for plan in checkpoint_plans(preset_config(preset), "mxfp4"))
    assert round(total / 1e9, 1) == gigabytes


def test_tensors_are_ordered_by_width_then_by_name_bytes() -> None:
    plans = [
        TensorPlan(name=name, dtype=dtype, shape=(1,))
        for name, dtype in [
            ("b", "U8"),
            ("a", "U8"),
            ("z", "BF16"),
            ("10", "F32"),
            ("9", "F32"),
            ("A", "BF16"),
        ]
    ]
    plan = plan_shard("a.safetensors", plans)
    assert [tensor.name for tensor in plan.tensors] == ["10", "9", "A", "z", "a", "b"]
    assert len(plan.header) % 8 == 0
    assert list(json.loads(plan.header[8:])) == ["10", "9", "A", "z", "a", "b"]


def test_a_name_planned_twice_is_refused() -> None:
    twice = [TensorPlan(name="a", dtype="F32", shape=(1,))] * 2
    with pytest.raises(ValueError, match="planned twice"):
        plan_shard("a.safetensors", twice)
