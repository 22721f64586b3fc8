"""The index over shards: every tensor found at its bytes, everything wrong refused at open."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import handmade_shards as shards
import numpy as np
import pytest

from twoends.checkpoint import index_cache, names
from twoends.checkpoint.config import read_config
from twoends.checkpoint.index import CheckpointIndex, Segment
from twoends.errors import CheckpointError

INDEX = "model.safetensors.index.json"
PREFIX = "language_model.model."
SHARD_OF_LAYER_3 = "model-00004-of-000010.safetensors"
SHARD_OF_LAYER_5 = "model-00006-of-000010.safetensors"


def open_index(directory: Path, **options: int) -> CheckpointIndex:
    return CheckpointIndex.open(directory, read_config(directory), **options)


def refusal(directory: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_index(directory)
    return str(caught.value)


def read(index: CheckpointIndex, segment: Segment) -> bytes:
    with index.paths[segment.path_id].open("rb") as file:
        file.seek(segment.offset)
        return file.read(segment.nbytes)


def edit_shard(directory: Path, shard: str, change: Callable[[dict], None]) -> None:
    """Rewrites one shard with changed tensors, and the index so that it agrees."""
    tensors = shards.unpack(directory / shard)
    change(tensors)
    shards.pack(directory / shard, tensors)
    path = directory / INDEX
    index = json.loads(path.read_text())
    index["weight_map"] = {n: s for n, s in index["weight_map"].items() if s != shard} | dict.fromkeys(
        tensors, shard
    )
    index["metadata"]["total_size"] = sum(len(shards.split(p)[1]) for p in directory.glob("*.safetensors"))
    path.write_text(json.dumps(index))


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


@pytest.mark.parametrize("shape", [[4], [5, 1], [1, 1, 4, 1], [2, 1, 5, 1], []], ids=str)
def test_a_log_of_another_shape_is_refused(k3_copy: Path, shape: list[int]) -> None:
    name = f"{PREFIX}layers.5.self_attn.A_log"
    size = 4 * int(np.prod(shape))
    edit_shard(k3_copy, SHARD_OF_LAYER_5, lambda t: t.update({name: ("F32", shape, bytes(size))}))
    assert f"found      F32 {shape}" in refusal(k3_copy)


def test_a_single_file_without_an_index_is_enough(nano_kimi_linear: Path, tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(nano_kimi_linear / "config.json", alone)
    shutil.copy(nano_kimi_linear / "model-00001-of-00001.safetensors", alone / "model.safetensors")
    assert open_index(alone).num_tensors == open_index(nano_kimi_linear).num_tensors


def test_several_shards_without_an_index_are_refused(k3_copy: Path) -> None:
    (k3_copy / INDEX).unlink()
    assert f"has no {INDEX}" in refusal(k3_copy)


def test_a_directory_without_weights_is_refused(k3_copy: Path) -> None:
    for path in [*k3_copy.glob("*.safetensors"), k3_copy / INDEX]:
        path.unlink()
    assert "has no weights" in refusal(k3_copy)


def test_a_missing_shard_is_named_with_its_layers(k3_copy: Path) -> None:
    (k3_copy / SHARD_OF_LAYER_5).unlink()
    text = refusal(k3_copy)
    assert text.startswith(f"{SHARD_OF_LAYER_5} is missing; {INDEX} names it.")
    assert ["layers", "in", "it", "5"] in [line.split() for line in text.splitlines()]


def test_a_link_to_a_file_that_is_gone_counts_as_missing(k3_copy: Path) -> None:
    (k3_copy / SHARD_OF_LAYER_5).unlink()
    (k3_copy / SHARD_OF_LAYER_5).symlink_to(k3_copy / "gone")
    assert f"{SHARD_OF_LAYER_5} is missing" in refusal(k3_copy)


def test_a_shard_that_the_index_does_not_name_is_refused(k3_copy: Path) -> None:
    shutil.copy(k3_copy / SHARD_OF_LAYER_5, k3_copy / "model-00011-of-000010.safetensors")
    assert refusal(k3_copy).startswith(f"model-00011-of-000010.safetensors is not in {INDEX}.")


def test_a_truncated_shard_is_named_with_its_layer_and_missing_bytes(k3_copy: Path) -> None:
    path = k3_copy / SHARD_OF_LAYER_5
    path.write_bytes(path.read_bytes()[:-4096])
    text = refusal(k3_copy)
    assert text.startswith(f"{SHARD_OF_LAYER_5} ends 4,096 bytes early; part of layer 5 is missing.")


def test_an_index_that_puts_a_tensor_elsewhere_is_refused(k3_copy: Path) -> None:
    name = f"{PREFIX}layers.3.input_layernorm.weight"
    shards.edit_index(k3_copy, **{name: SHARD_OF_LAYER_5})
    text = refusal(k3_copy)
    assert f"{SHARD_OF_LAYER_3} does not hold the tensors" in text
    assert f"only in the shard   {name}" in text


def test_an_index_with_a_tensor_that_no_shard_has_is_refused(k3_copy: Path) -> None:
    shards.edit_index(k3_copy, phantom=SHARD_OF_LAYER_3)
    assert "only in the index   phantom" in refusal(k3_copy)


def test_two_swapped_names_do_not_cancel_out(k3_copy: Path) -> None:
    shards.edit_index(
        k3_copy,
        **{
            f"{PREFIX}layers.3.input_layernorm.weight": SHARD_OF_LAYER_5,
            f"{PREFIX}layers.5.input_layernorm.weight": SHARD_OF_LAYER_3,
        },
    )
    assert "does not hold the tensors" in refusal(k3_copy)


def test_a_wrong_total_size_is_refused_with_both_numbers(k3_copy: Path) -> None:
    index = json.loads((k3_copy / INDEX).read_text())
    total = index["metadata"]["total_size"]
    index["metadata"]["total_size"] = total + 2
    (k3_copy / INDEX).write_text(json.dumps(index))
    assert f"The shards hold {total:,} bytes of tensors; {INDEX} promises {total + 2:,}." in refusal(k3_copy)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (f"{PREFIX}layers.5.self_attn.dt_bias", "F32 [120]"),
        (f"{PREFIX}layers.5.block_sparse_moe.experts.13.w3.weight_scale", "U8 [96, 2]"),
        (f"{PREFIX}layers.5.block_sparse_moe.gate.weight", "BF16 [14, 104]"),
    ],
)
def test_a_missing_tensor_is_named_with_layer_and_form(k3_copy: Path, name: str, expected: str) -> None:
    edit_shard(k3_copy, SHARD_OF_LAYER_5, lambda tensors: tensors.pop(name))
    text = refusal(k3_copy)
    assert "layer 5 lacks a tensor" in text
    assert f"{name}  {expected}" in text


@pytest.mark.parametrize(
    ("name", "form", "expected", "found"),
    [
        ("self_attn.q_proj.weight", ("BF16", [104, 120]), "BF16 or F32 [120, 104]", "BF16 [104, 120]"),
        ("self_attn.q_proj.weight", ("F16", [120, 104]), "BF16 or F32 [120, 104]", "F16 [120, 104]"),
        ("self_attn.q_conv1d.weight", ("F32", [120, 4]), "BF16 or F32 [120, 1, 4]", "F32 [120, 4]"),
        ("block_sparse_moe.experts.2.w1.weight_packed", ("I8", [96, 32]), "U8 [96, 32]", "I8 [96, 32]"),
        ("block_sparse_moe.experts.2.w2.weight_scale", ("U8", [3, 64]), "U8 [64, 3]", "U8 [3, 64]"),
    ],
)  # fmt: skip
def test_a_wrong_shape_or_dtype_is_refused(
    k3_copy: Path, name: str, form: tuple[str, list[int]], expected: str, found: str
) -> None:
    dtype, shape = form
    size = {"BF16": 2, "F16": 2, "F32": 4}.get(dtype, 1) * int(np.prod(shape))
    full = f"{PREFIX}layers.5.{name}"
    edit_shard(k3_copy, SHARD_OF_LAYER_5, lambda t: t.update({full: (dtype, shape, bytes(size))}))
    lines = [" ".join(line.split()) for line in refusal(k3_copy).splitlines()]
    assert lines[0] == f"{full} does not have the form that the config asks for."
    assert {"layer 5", f"expected {expected}", f"found {found}"} <= set(lines)


@pytest.mark.parametrize(
    "name",
    [
        f"{PREFIX}layers.5.self_attn.q_proj.bias",
        f"{PREFIX}layers.9.input_layernorm.weight",
        f"{PREFIX}layers.5.block_sparse_moe.experts.14.w1.weight_packed",
        f"{PREFIX}layers.0.block_sparse_moe.experts.0.w1.weight_packed",
        f"{PREFIX}layers.05.block_sparse_moe.experts.0.w1.weight_packed",
        "model.layers.5.input_layernorm.weight",
        f"{PREFIX}layers.5.self_attn.q_proj.weight_packed",
    ],
)
def test_a_tensor_that_the_config_does_not_have_is_refused(k3_copy: Path, name: str) -> None:
    form = ("U8", [96, 32], bytes(96 * 32)) if "experts" in name else ("BF16", [4], bytes(8))
    edit_shard(k3_copy, SHARD_OF_LAYER_5, lambda tensors: tensors.update({name: form}))
    assert f"has a tensor that this config does not have: {name}" in refusal(k3_copy)


def test_a_tensor_in_two_shards_is_refused(k3_copy: Path) -> None:
    name = f"{PREFIX}layers.5.input_layernorm.weight"
    copied = shards.unpack(k3_copy / SHARD_OF_LAYER_5)[name]
    tensors = shards.unpack(k3_copy / SHARD_OF_LAYER_3) | {name: copied}
    shards.pack(k3_copy / SHARD_OF_LAYER_3, tensors)
    assert "does not hold the tensors" in refusal(k3_copy)


def test_packed_and_plain_experts_in_one_checkpoint_are_refused(k3_copy: Path) -> None:
    base = f"{PREFIX}layers.5.block_sparse_moe.experts.2.w1.weight"

    def unpack_one(tensors: dict) -> None:
        del tensors[f"{base}_packed"], tensors[f"{base}_scale"]
        tensors[base] = ("BF16", [96, 64], bytes(2 * 96 * 64))

    edit_shard(k3_copy, SHARD_OF_LAYER_5, unpack_one)
    text = refusal(k3_copy)
    assert "mixes packed and plain experts" in text
    assert base in text


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "it ends where an opening brace should be"),
        ("[]", "stands where an opening brace should be"),
        ('{"metadata": {}}', "it has no 'weight_map'"),
        ('{"weight_map": {"a": "b.safetensors"', "where 'tensor': 'shard' should be"),
        ('{"weight_map": {"a": 3}}', "where 'tensor': 'shard' should be"),
        ('{"weight_map": {"a": "../b.safetensors"}}', "not a shard's name"),
        ('{"weight_map": {"a": "b.bin"}}', "not a shard's name"),
        ('{"weight_map": {"a": "b.safetensors"}} tail', "something follows its end"),
        ('{"weight_map": {}, "weight_map": {}}', "appears twice"),
        ('{"other": {}}', "is not 'metadata' or 'weight_map'"),
        ('{"metadata": [1], "weight_map": {}}', "its metadata is not an object"),
        ('{"metadata": {"total_size": "9"}, "weight_map": {"a": "b.safetensors"}}', "total_size is '9'"),
    ],
)
def test_an_index_file_that_is_not_one_is_refused(k3_copy: Path, text: str, reason: str) -> None:
    (k3_copy / INDEX).write_text(text)
    assert reason in refusal(k3_copy)


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


class TestCache:
    """An index that is kept must be as good as one that is built, or not be used."""

    def kept(self) -> list[Path]:
        return list(index_cache.cache_directory().glob("*"))

    def test_a_kept_index_equals_a_built_one(self, k3_copy: Path) -> None:
        built = open_index(k3_copy, cache_from=0)
        (path,) = self.kept()
        stamp = path.stat().st_mtime_ns
        kept = open_index(k3_copy, cache_from=0)
        assert path.stat().st_mtime_ns == stamp
        assert kept.fingerprint == built.fingerprint
        assert kept.tensors(5) == built.tensors(5)
        assert kept.expert(5, 13) == built.expert(5, 13)
        assert (kept.total_bytes, kept.trunk_bytes) == (built.total_bytes, built.trunk_bytes)

    def test_a_small_index_is_not_kept(self, k3_copy: Path) -> None:
        open_index(k3_copy)
        assert self.kept() == []

    @pytest.mark.parametrize("damage", ["flip", "cut", "empty"])
    def test_a_damaged_kept_index_is_built_again(self, k3_copy: Path, damage: str) -> None:
        built = open_index(k3_copy, cache_from=0)
        (path,) = self.kept()
        data = bytearray(path.read_bytes())
        data[-100] ^= 1
        path.write_bytes({"flip": bytes(data), "cut": bytes(data[:-1]), "empty": b""}[damage])
        again = open_index(k3_copy, cache_from=0)
        assert again.expert(8, 13) == built.expert(8, 13)
        assert open_index(k3_copy, cache_from=0).fingerprint == built.fingerprint

    def test_a_changed_shard_is_not_served_from_the_cache(self, k3_copy: Path) -> None:
        open_index(k3_copy, cache_from=0)
        path = k3_copy / SHARD_OF_LAYER_5
        path.write_bytes(path.read_bytes()[:-64])
        with pytest.raises(CheckpointError, match="ends 64 bytes early"):
            open_index(k3_copy, cache_from=0)

    def test_a_shard_replaced_by_one_of_equal_size_is_read_again(self, k3_copy: Path) -> None:
        open_index(k3_copy, cache_from=0)
        path = k3_copy / SHARD_OF_LAYER_5
        path.write_bytes(path.read_bytes().replace(b"dt_bias", b"dt_bios", 1))
        with pytest.raises(CheckpointError, match="does not hold the tensors"):
            open_index(k3_copy, cache_from=0)

    def test_a_cache_that_can_not_be_written_is_not_an_error(
        self, k3_copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "file").write_text("in the way")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
        assert open_index(k3_copy, cache_from=0).num_tensors == 906
