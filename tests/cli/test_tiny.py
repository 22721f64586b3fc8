"""`twoends tiny`: writes what the others read."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace


def test_what_it_writes_can_be_inspected(twoends, tmp_path):
    result = twoends("tiny", tmp_path / "new", "--layers", 4, "--seed", 5)
    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    fingerprint = json.loads(twoends("inspect", tmp_path / "new", "--json").out)["fingerprint"]
    assert lines[1:] == [
        f"  to            {tmp_path}/new",
        f"  fingerprint   {fingerprint}",
        "",
        f'  twoends run {tmp_path}/new "Hello" -n 16',
    ]


def test_sparse_experts_take_no_room(twoends, tmp_path):
    words = ["--family", "kimi-linear", "--layers", 4, "--json"]
    dense = json.loads(twoends("tiny", tmp_path / "dense", *words).out)
    sparse = json.loads(twoends("tiny", tmp_path / "sparse", "--sparse", *words).out)
    assert sparse["total_bytes"] == dense["total_bytes"]
    assert sparse["disk_bytes"] < dense["disk_bytes"]


def test_a_directory_that_is_not_empty_is_left_alone(twoends, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    result = twoends("tiny", tmp_path / "full")
    assert (result.code, result.out) == (2, "")
    assert result.err == (
        f"twoends: {tmp_path}/full is not empty.\n\n    found   notes.txt\n\n"
        "  Nothing was written. Choose a new directory, or an empty one.\n"
    )
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["notes.txt"]


def test_a_full_disk_is_said_before_anything_is_written(twoends, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10))
    result = twoends("tiny", tmp_path / "new")
    assert result.code == 3
    assert list((tmp_path / "new").glob("*")) == []
