"""Our writer and reader of safetensors files beside the library of that name."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

safetensors = pytest.importorskip("safetensors", reason="this oracle needs the safetensors library")

from safetensors.numpy import save_file  # noqa: E402

from twoends.checkpoint.config import read_config  # noqa: E402
from twoends.checkpoint.layout import TensorPlan, checkpoint_plans, plan_shard  # noqa: E402
from twoends.checkpoint.safetensors import read_header  # noqa: E402
from twoends.checkpoint.writer import ShardWriter  # noqa: E402

NUMPY_TYPES = {"F32": np.float32, "BF16": np.uint16, "U8": np.uint8}


def planned_tensors() -> dict[TensorPlan, np.ndarray]:
    """Every dtype of the release; odd sizes, an empty tensor, a name with an accent, NaN and minus zero."""
    rng = np.random.default_rng(1)
    shapes = {
        "model.layers.10.a.weight": ("BF16", (3, 5)),
        "model.layers.2.a.weight": ("BF16", (7,)),
        "model.layers.2.A_log": ("F32", (1, 1, 3, 1)),
        "model.layers.2.experts.0.w1.weight_packed": ("U8", (3, 16)),
        "model.layers.2.experts.0.w1.weight_scale": ("U8", (3, 1)),
        "model.empty": ("F32", (0, 4)),
        "model.caf\u00e9": ("F32", (2,)),
    }
    found = {}
    for name, (dtype, shape) in shapes.items():
        kind = NUMPY_TYPES[dtype]
        size = int(np.prod(shape)) * np.dtype(kind).itemsize
        # Bytes of any value: among them patterns that are NaN as F32 or BF16.
        values = np.frombuffer(rng.bytes(size), kind).reshape(shape)
        found[TensorPlan(name=name, dtype=dtype, shape=shape)] = values
    return found


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}], ids=["plain", "with-metadata"])
def test_the_library_reads_what_our_writer_wrote(tmp_path: Path, metadata) -> None:
    tensors = planned_tensors()
    plan = plan_shard("a.safetensors", tensors, metadata=metadata)
    with ShardWriter(tmp_path, plan) as shard:
        for tensor, values in tensors.items():
            shard.write(tensor.name, values)
    found = dict(safetensors.deserialize((tmp_path / "a.safetensors").read_bytes()))
    assert found.keys() == {tensor.name for tensor in tensors}
    for tensor, values in tensors.items():
        entry = found[tensor.name]
        assert (entry["dtype"], tuple(entry["shape"])) == (tensor.dtype, tensor.shape)
        assert bytes(entry["data"]) == values.tobytes()
    with safetensors.safe_open(tmp_path / "a.safetensors", framework="np") as opened:
        assert (opened.metadata() or None) == metadata


@pytest.mark.parametrize("metadata", [None, {"format": "pt", "who": "caf\u00e9"}], ids=["plain", "metadata"])
def test_our_reader_reads_what_the_library_wrote(tmp_path: Path, metadata) -> None:
    rng = np.random.default_rng(2)
    kinds = (np.float64, np.float32, np.float16, np.int64, np.int32, np.uint8, np.int8, np.bool_)
    tensors = {
        f"layers.{i}.{np.dtype(kind).name}": rng.integers(0, 2, (i + 1, 3)).astype(kind)
        for i, kind in enumerate(kinds)
    }
    tensors |= {"scalar": np.array(1.5, np.float32), "empty": np.zeros((0, 3), np.float32)}
    path = tmp_path / "a.safetensors"
    save_file(tensors, path, metadata=metadata)
    header, raw = read_header(path), path.read_bytes()
    assert set(header.names) == tensors.keys()
    for name, shape, begin, end in zip(
        header.names, header.shapes, header.begins.tolist(), header.ends.tolist(), strict=True
    ):
        assert shape == tensors[name].shape
        assert raw[begin:end] == tensors[name].tobytes()


@pytest.mark.parametrize("family", ["kimi-k3", "kimi-linear"])
def test_every_shard_of_a_checkpoint_says_the_same_to_both(nano_dirs, family: str) -> None:
    directory = nano_dirs[family]
    config = read_config(directory)
    plans = list(checkpoint_plans(config, "mxfp4" if family == "kimi-k3" else "bf16"))
    assert {plan.file_name for plan in plans} == {path.name for path in directory.glob("*.safetensors")}
    for plan in plans:
        raw = (directory / plan.file_name).read_bytes()
        header = read_header(directory / plan.file_name)
        ours = {
            name: (dtype, list(shape), hashlib.sha256(raw[begin:end]).digest())
            for name, dtype, shape, begin, end in zip(
                header.names, header.dtypes, header.shapes, header.begins, header.ends, strict=True
            )
        }
        theirs = {
            name: (entry["dtype"], entry["shape"], hashlib.sha256(entry["data"]).digest())
            for name, entry in safetensors.deserialize(raw)
        }
        assert ours == theirs


@pytest.mark.parametrize("family", ["kimi-k3", "kimi-linear"])
def test_the_library_would_have_written_the_same_bytes(nano_dirs, tmp_path: Path, family: str) -> None:
    """Order of tensors, header, padding: our files can't be told from those the releases were made with."""
    pytest.importorskip("torch", reason="numpy has no BF16, so the library writes it from torch tensors")
    from safetensors.torch import load_file, save_file

    for path in nano_dirs[family].glob("*.safetensors"):
        with safetensors.safe_open(path, framework="np") as opened:
            metadata = opened.metadata() or None
        save_file(load_file(path), tmp_path / path.name, metadata=metadata)
        assert (tmp_path / path.name).read_bytes() == path.read_bytes()
