"""Seconds from a plan, and the figures that doctor keeps for them."""

from __future__ import annotations

import dataclasses
import json

import pytest

from twoends.checkpoint.presets import preset_config
from twoends.engine.budget import Plan
from twoends.engine.device import DiskRate
from twoends.kernels.choose import choose
from twoends.sizing import calibrate
from twoends.sizing.calibration import ComputeRate, keep_compute, kept_compute
from twoends.sizing.estimate import estimate

CONFIG = preset_config("mini")
DISK = DiskRate(bytes_per_s=1e9, date="2026-11-30", is_direct=True, piece_bytes=4 * 2**20, depth=4)
RATE = ComputeRate(
    isa="avx512", threads=2, bf16_bytes_per_s=10e9, mxfp4_bytes_per_s=5e9, layer_s=1e-3,
    reading_bytes_per_s=2e9, date="2026-11-30",
)  # fmt: skip


def a_plan(*, pinned: int) -> Plan:
    """500 MB of trunk, 100 MB of experts a token."""
    shown = {
        "pinned_bytes": pinned,
        "rows": (),
        "floor_rows": (),
        "trunk_bytes_per_pass": 500_000_000,
        "expert_bytes_per_request": 1_000_000.0,
        "experts_per_pass": 100,
    }
    return Plan(**{field.name: shown.get(field.name, 0) for field in dataclasses.fields(Plan)})


def test_a_streamed_trunk_takes_its_reading_and_the_arithmetic():
    found = estimate(a_plan(pinned=0), CONFIG, disk=DISK, compute=RATE)
    assert (found.reading_s, found.seconds, found.wall) == (pytest.approx(0.6), pytest.approx(0.694), "disk")


def test_experts_are_waited_for_after_they_are_chosen():
    # 0.05 s of trunk, 0.02 s of experts, 24 ms of layers; and 0.1 s of reading
    found = estimate(a_plan(pinned=500_000_000), CONFIG, disk=DISK, compute=RATE)
    assert found.arithmetic_s == pytest.approx(0.05 + 0.02 + 0.024)
    assert (found.seconds, found.demanded_s) == (pytest.approx(0.194), pytest.approx(0.1))


def test_experts_that_are_here_are_not_read():
    found = estimate(a_plan(pinned=500_000_000), CONFIG, disk=DISK, compute=RATE, hit_share=0.75)
    assert found.read_bytes == pytest.approx(25_000_000)
    assert found.seconds == pytest.approx(0.094 + 0.025)


def test_reading_goes_at_the_rate_of_passes_that_stream_where_that_is_slower():
    slow = dataclasses.replace(RATE, reading_bytes_per_s=DISK.bytes_per_s / 2)
    plain, slower = (estimate(a_plan(pinned=0), CONFIG, disk=DISK, compute=r) for r in (RATE, slow))
    assert plain.reading_s == pytest.approx(plain.read_bytes / DISK.bytes_per_s)
    assert slower.reading_s == pytest.approx(2 * plain.reading_s)
    assert slower.demanded_s == pytest.approx(2 * plain.demanded_s)


def test_without_the_arithmetic_it_is_reading_alone():
    found = estimate(a_plan(pinned=0), CONFIG, disk=DISK, compute=None)
    assert (found.arithmetic_s, found.seconds, found.wall) == (None, pytest.approx(0.6), None)


def test_without_the_disk_there_is_no_estimate():
    assert estimate(a_plan(pinned=0), CONFIG, disk=None, compute=RATE).seconds is None


def test_a_packed_trunk_has_no_arithmetic_that_was_measured():
    assert estimate(a_plan(pinned=0), CONFIG, disk=DISK, compute=RATE, is_packed=True).arithmetic_s is None


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """A cache directory of this test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_what_was_kept_is_found_for_the_same_kernels_and_disk(own_cache, tmp_path):
    keep_compute(tmp_path, RATE)
    assert kept_compute(tmp_path, isa="avx512", threads=2) == RATE
    assert kept_compute(tmp_path, isa="avx2", threads=2) is None
    assert kept_compute(tmp_path, isa="avx512", threads=1) is None


@pytest.mark.parametrize(
    "damage",
    [lambda kept: "{", lambda kept: "[]", lambda kept: kept.replace("10000000000.0", "0"),
     lambda kept: kept.replace("10000000000.0", "NaN"), lambda kept: kept.replace("layer_s", "layer")],
)  # fmt: skip
def test_a_damaged_cache_is_as_if_nothing_was_measured(own_cache, tmp_path, damage):
    keep_compute(tmp_path, RATE)
    (place,) = own_cache.rglob("compute.json")
    place.write_text(damage(place.read_text()))
    assert kept_compute(tmp_path, isa="avx512", threads=2) is None


def test_measuring_gives_rates_above_zero_and_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(calibrate, "_LARGE", "nano")
    monkeypatch.setattr(calibrate, "_ROUNDS", 1)
    choice = choose(threads=1, isa=None, kernels=None)
    if choice.isa is None:
        pytest.skip("the native kernels are not built")
    found = calibrate.measure_compute(tmp_path, choice)
    assert min(found.bf16_bytes_per_s, found.mxfp4_bytes_per_s, found.layer_s) > 0
    assert found.reading_bytes_per_s > 0
    assert list(tmp_path.iterdir()) == []
    assert json.loads(json.dumps(found.as_object()))["threads"] == 1
