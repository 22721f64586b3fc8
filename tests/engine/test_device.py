"""What is kept of a device: read back for its directory, and never trusted blindly."""

from __future__ import annotations

import json
import os

import pytest

from twoends.engine.device import DiskRate, keep_rate, rate_under, shape_under
from twoends.engine.reader import DEPTH, PIECE_BYTES, ReadShape

RATE = DiskRate(bytes_per_s=2e9, date="2026-11-30", is_direct=True, piece_bytes=2**20, depth=8)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def kept_file(tmp_path):
    return next((tmp_path / "cache").rglob("disks.json"))


def test_the_measured_shape_is_given_to_whoever_reads_that_device(tmp_path):
    keep_rate(tmp_path, RATE)
    assert rate_under(tmp_path) == RATE
    assert shape_under(tmp_path) == ReadShape(piece_bytes=2**20, depth=8)


def test_an_unmeasured_device_is_read_as_usual(tmp_path):
    assert rate_under(tmp_path) is None
    assert shape_under(tmp_path) == ReadShape(piece_bytes=PIECE_BYTES, depth=DEPTH)


def test_other_devices_stay_when_one_is_measured(tmp_path):
    keep_rate(tmp_path, RATE)
    known = json.loads(kept_file(tmp_path).read_text())
    known["other"] = known[str(os.stat(tmp_path).st_dev)]
    kept_file(tmp_path).write_text(json.dumps(known))
    keep_rate(tmp_path, RATE)
    assert "other" in json.loads(kept_file(tmp_path).read_text())


@pytest.mark.parametrize(
    "wrong",
    [
        {"piece_bytes": 1000},
        {"piece_bytes": 0},
        {"piece_bytes": 2**40},
        {"depth": 0},
        {"depth": 10_000},
        {"depth": "4"},
        {"bytes_per_s": 0},
        {"bytes_per_s": None},
        {"more": 1},
    ],
)
def test_a_kept_rate_that_makes_no_sense_is_as_none(tmp_path, wrong):
    keep_rate(tmp_path, RATE)
    device = str(os.stat(tmp_path).st_dev)
    kept_file(tmp_path).write_text(json.dumps({device: RATE.as_object() | wrong}))
    assert rate_under(tmp_path) is None


@pytest.mark.parametrize("text", ["", "[]", "{", '{"1": 2}'])
def test_a_damaged_file_is_as_none(tmp_path, text):
    keep_rate(tmp_path, RATE)
    kept_file(tmp_path).write_text(text)
    assert shape_under(tmp_path) == ReadShape()
