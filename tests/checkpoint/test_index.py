"""The index over shards: every tensor found at its bytes, whatever form the shards have."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.checkpoint import handmade_shards as shards
from tests.checkpoint.handmade_shards import INDEX, PREFIX, SHARD_OF_LAYER_3, SHARD_OF_LAYER_5, edit_shard
from tests.support.checkpoints import open_index
from twoends.checkpoint import names
from twoends.checkpoint.config import read_config
from twoends.checkpoint.index import CheckpointIndex, Segment


def read(index: CheckpointIndex, segment: Segment) -> bytes:
    with index.paths[segment.path_id].open("rb") as file:
        file.seek(segment.offset)
        return file.read(segment.nbytes)


@pytest.mark.parametrize("fixture", ["nano_k3", "nano_kimi_linear"])
def test_every_tensor_is_found_at_its_bytes(fixture: str, request: pytest.FixtureRequest) -> None:
    directory = request.getfixturevalue(fixture)
    index = open_index(directory)
    config = index.config
    expected = {}
    for path in directory.glob("*.safetensors"):
        expected |= shards.unpack(path)
    for layer in [None, *range(config.num_layers)]:
        for ref in index.tensors(layer).values():
            dtype, shape, data = expected.pop(ref.file_name)
            assert (ref.dtype, list(ref.shape)) == (dtype, shape)
            assert read(index, ref.segment) == data
    for layer in config.moe_layers:
        for expert in range(config.num_experts):
            prefix = names.expert_prefix(config, layer, expert)
            for segment, part in zip(index.expert(layer, expert), index.expert_parts, strict=True):
                assert read(index, segment) == expected.pop(prefix + part.file_name)[2]
    assert expected == {}


def test_one_tensor_by_its_short_name(nano_k3: Path) -> None:
    index = open_index(nano_k3)
    ref = index.tensor(3, "kv_b_proj")
    assert ref.file_name == f"{PREFIX}layers.3.self_attn.kv_b_proj.weight"
    assert (ref.shape, ref.dtype) == ((3 * 48, 36), "BF16")
    assert index.tensor(None, "lm_head").file_name == "language_model.lm_head.weight"


@pytest.mark.parametrize(
    ("layer", "name"), [(3, "f_a_proj"), (0, "router"), (9, "q_proj"), (-1, "q_proj"), (None, "q_proj")]
)
def test_a_tensor_that_is_not_there_is_a_key_error(nano_k3: Path, layer: int | None, name: str) -> None:
    with pytest.raises(KeyError):
        open_index(nano_k3).tensor(layer, name)


@pytest.mark.parametrize(("layer", "expert"), [(0, 0), (1, 14), (1, -1), (9, 0)])
def test_an_expert_that_is_not_there_is_an_index_error(nano_k3: Path, layer: int, expert: int) -> None:
    with pytest.raises(IndexError):
        open_index(nano_k3).expert(layer, expert)


def test_byte_sums_add_up(nano_k3: Path) -> None:
    index = open_index(nano_k3)
    embed = index.tensor(None, "embed").segment.nbytes
    assert index.expert_bytes == 3 * 96 * 64 * 17 // 32
    assert index.trunk_bytes + embed + index.experts_bytes == index.total_bytes
    layers = sum(index.layer_bytes(layer) for layer in range(index.config.num_layers))
    top = sum(ref.segment.nbytes for ref in index.tensors(None).values())
    assert layers + top == index.trunk_bytes + embed


def test_how_experts_are_stored_is_decided_by_the_tensors(k3_copy: Path, nano_kimi_linear: Path) -> None:
    assert open_index(k3_copy).expert_format == "mxfp4"
    assert open_index(nano_kimi_linear).expert_format == "bf16"
    config = json.loads((k3_copy / "config.json").read_text())
    del config["text_config"]["quantization_config"]
    (k3_copy / "config.json").write_text(json.dumps(config))
    assert open_index(k3_copy).expert_format == "mxfp4"


def test_an_expert_split_over_two_shards_is_whole(k3_copy: Path) -> None:
    before = open_index(k3_copy)
    wanted = [read(before, segment) for segment in before.expert(5, 11)]
    moved = f"{PREFIX}layers.5.block_sparse_moe.experts.11.w2.weight_packed"
    taken = {}
    edit_shard(k3_copy, SHARD_OF_LAYER_5, lambda tensors: taken.update({moved: tensors.pop(moved)}))
    edit_shard(k3_copy, SHARD_OF_LAYER_3, lambda tensors: tensors.update(taken))
    after = open_index(k3_copy)
    segments = after.expert(5, 11)
    assert [read(after, segment) for segment in segments] == wanted
    assert len({segment.path_id for segment in segments}) == 2


def test_vision_tensors_are_counted_and_left_alone(k3_copy: Path) -> None:
    vision = {
        "vision_tower.encoder.blocks.0.wqkv.weight": ("BF16", [3, 4], bytes(24)),
        "mm_projector.proj.0.weight": ("BF16", [2], bytes(4)),
    }
    before = open_index(k3_copy)
    edit_shard(k3_copy, SHARD_OF_LAYER_3, lambda tensors: tensors.update(vision))
    index = open_index(k3_copy)
    assert (index.vision_tensors, index.vision_bytes) == (2, 28)
    assert index.trunk_bytes == before.trunk_bytes


def test_f32_matrices_are_accepted_and_stay_f32(k3_copy: Path) -> None:
    name = f"{PREFIX}layers.3.self_attn.kv_b_proj.weight"

    def widen(tensors: dict) -> None:
        _, shape, data = tensors[name]
        tensors[name] = ("F32", shape, bytes(2 * len(data)))

    edit_shard(k3_copy, SHARD_OF_LAYER_3, widen)
    ref = open_index(k3_copy).tensor(3, "kv_b_proj")
    assert (ref.dtype, ref.segment.nbytes) == ("F32", 4 * 144 * 36)


@pytest.mark.parametrize("shape", [[5], [24], [1, 1, 5, 1], [1, 1, 24, 1]], ids=str)
def test_a_log_may_be_padded_or_have_unit_dimensions(k3_copy: Path, shape: list[int]) -> None:
    name = f"{PREFIX}layers.5.self_attn.A_log"
    size = 4 * int(np.prod(shape))
    edit_shard(k3_copy, SHARD_OF_LAYER_5, lambda t: t.update({name: ("F32", shape, bytes(size))}))
    assert open_index(k3_copy).tensor(5, "a_log").shape == tuple(shape)


def test_a_single_file_without_an_index_is_enough(nano_kimi_linear: Path, tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(nano_kimi_linear / "config.json", alone)
    shutil.copy(nano_kimi_linear / "model-00001-of-00001.safetensors", alone / "model.safetensors")
    assert open_index(alone).num_tensors == open_index(nano_kimi_linear).num_tensors


def test_an_index_file_is_read_whatever_its_spaces_order_and_escapes(k3_copy: Path) -> None:
    before = open_index(k3_copy)
    index = json.loads((k3_copy / INDEX).read_text())
    turned = {
        "weight_map": dict(reversed(index["weight_map"].items())),
        "metadata": index["metadata"] | {"total_size": float(index["metadata"]["total_size"])},
    }
    text = json.dumps(turned, indent=7, separators=(" ,\n", "  :\t")).replace("layers.3.", "layers.\\u0033.")
    (k3_copy / INDEX).write_text(text)
    assert open_index(k3_copy).fingerprint == before.fingerprint


def test_the_fingerprint_follows_config_and_headers_but_not_the_place(k3_copy: Path, nano_k3: Path) -> None:
    config = read_config(nano_k3)
    original = CheckpointIndex.open(nano_k3, config).fingerprint
    assert open_index(k3_copy).fingerprint == original
    assert CheckpointIndex.open(nano_k3, config.with_latent_eps(1e-5)).fingerprint != original
    name = f"{PREFIX}layers.5.self_attn.A_log"
    edit_shard(k3_copy, SHARD_OF_LAYER_5, lambda t: t.update({name: ("F32", [5], bytes(20))}))
    assert open_index(k3_copy).fingerprint != original
