"""Whatever is wrong with shards or their index is refused at open, by file, tensor and number."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.checkpoint import handmade_shards as shards
from tests.checkpoint.handmade_shards import INDEX, PREFIX, SHARD_OF_LAYER_3, SHARD_OF_LAYER_5, edit_shard
from tests.support.checkpoints import open_index
from twoends.errors import CheckpointError


def refusal(directory: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_index(directory)
    return str(caught.value)


@pytest.mark.parametrize("shape", [[4], [5, 1], [1, 1, 4, 1], [2, 1, 5, 1], []], ids=str)
def test_a_log_of_another_shape_is_refused(k3_copy: Path, shape: list[int]) -> None:
    name = f"{PREFIX}layers.5.self_attn.A_log"
    size = 4 * int(np.prod(shape))
    edit_shard(k3_copy, SHARD_OF_LAYER_5, lambda t: t.update({name: ("F32", shape, bytes(size))}))
    assert f"found      F32 {shape}" in refusal(k3_copy)


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
