"""Shards are written whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from twoends.checkpoint.layout import ShardPlan, TensorPlan, plan_shard
from twoends.checkpoint.safetensors import read_header
from twoends.checkpoint.writer import ShardWriter, write_checkpoint, write_text
from twoends.errors import DoesNotFit

WIDE = np.arange(6, dtype=np.float32).reshape(2, 3)
NARROW = np.arange(5, dtype=np.uint16)


def plan() -> ShardPlan:
    return plan_shard(
        "model-00001-of-000001.safetensors",
        [
            TensorPlan(name="narrow", dtype="BF16", shape=(5,)),
            TensorPlan(name="wide", dtype="F32", shape=(2, 3)),
        ],
    )


def values(tensor: TensorPlan) -> list[np.ndarray[Any, Any]]:
    return [WIDE] if tensor.name == "wide" else [NARROW]


def tensor_bytes(path: Path, name: str) -> bytes:
    header = read_header(path)
    i = header.names.index(name)
    return path.read_bytes()[header.begins[i] : header.ends[i]]


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, [plan()], values)
    path = tmp_path / plan().file_name
    assert tensor_bytes(path, "wide") == WIDE.tobytes()
    assert tensor_bytes(path, "narrow") == NARROW.tobytes()
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index == {
        "metadata": {"total_size": 34},
        "weight_map": {"narrow": path.name, "wide": path.name},
    }
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([path.name, "model.safetensors.index.json"])


def test_tensors_may_come_in_any_order_and_in_pieces(tmp_path: Path) -> None:
    with ShardWriter(tmp_path, plan()) as shard:
        shard.write("narrow", NARROW[:2])
        shard.write("wide", WIDE[0])
        shard.write("narrow", NARROW[2:])
        shard.write("wide", WIDE[1])
    assert tensor_bytes(tmp_path / plan().file_name, "narrow") == NARROW.tobytes()
    assert tensor_bytes(tmp_path / plan().file_name, "wide") == WIDE.tobytes()


def test_the_safetensors_library_reads_what_was_written(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.numpy", reason="the safetensors library is not installed")
    f32 = plan_shard("a.safetensors", [TensorPlan(name="wide", dtype="F32", shape=(2, 3))])
    write_checkpoint(tmp_path, [f32], values)
    assert np.array_equal(library.load_file(tmp_path / "a.safetensors")["wide"], WIDE)


def test_a_tensor_that_was_not_written_whole_leaves_no_file(tmp_path: Path) -> None:
    def write_part() -> None:
        with ShardWriter(tmp_path, plan()) as shard:
            shard.write("wide", WIDE)
            shard.write("narrow", NARROW[:2])

    with pytest.raises(ValueError, match="narrow lacks 6 bytes"):
        write_part()
    assert list(tmp_path.iterdir()) == []


def test_too_many_values_are_refused_and_leave_no_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has 24 bytes left"), ShardWriter(tmp_path, plan()) as shard:
        shard.write("wide", np.zeros(7, dtype=np.float32))
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_write_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), ShardWriter(tmp_path, plan()):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_sparse_tensors_read_as_zeros_and_take_no_room(tmp_path: Path) -> None:
    big = plan_shard("a.safetensors", [TensorPlan(name="hole", dtype="U8", shape=(1 << 30,))])
    write_checkpoint(tmp_path, [big], values, is_sparse=lambda name: name == "hole")
    path = tmp_path / "a.safetensors"
    assert path.stat().st_size == big.file_bytes
    assert path.stat().st_blocks * 512 < 1 << 20
    assert read_header(path).shapes == ((1 << 30,),)


def test_a_disk_too_small_is_said_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=17 << 20))
    huge = plan_shard("a.safetensors", [TensorPlan(name="big", dtype="U8", shape=(10**9,))])
    with pytest.raises(DoesNotFit, match=r"needs 1\.00 GB; the disk has 17\.8 MB free"):
        write_checkpoint(tmp_path, [huge], values)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_meanwhile_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, data: memoryview, offset: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(DoesNotFit, match="became full while model-00001"):
        write_checkpoint(tmp_path, [plan()], values)
    assert list(tmp_path.iterdir()) == []


def test_a_short_write_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: whole(fd, data[:3], offset))
    write_checkpoint(tmp_path, [plan()], values)
    assert tensor_bytes(tmp_path / plan().file_name, "wide") == WIDE.tobytes()


def test_a_small_file_is_replaced_whole(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")
    write_text(tmp_path / "a", "new\n")
    assert (tmp_path / "a").read_bytes() == b"new\n"
    assert len(list(tmp_path.iterdir())) == 1
