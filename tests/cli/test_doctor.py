"""`twoends doctor`: what it finds, and the rate that it keeps for `plan`."""

from __future__ import annotations

import functools
import json

import pytest

from twoends.cli import disks, doctor_machine, load
from twoends.engine import device
from twoends.errors import NotSound
from twoends.kernels.ops import Ops
from twoends.sizing import calibrate, calibration


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch):
    """A small file and short trials: the figures mean nothing here."""
    monkeypatch.setattr(disks, "_TRIAL_S", 0.002)
    monkeypatch.setattr(disks, "_ROUNDS", 1)
    monkeypatch.setattr(disks, "_PIECES", (disks.MB, disks.PIECE_BYTES))
    monkeypatch.setattr(
        doctor_machine, "measure_disk", functools.partial(disks.measure_disk, file_bytes=32 * 2**20)
    )
    monkeypatch.setattr(calibrate, "_LARGE", "nano")
    monkeypatch.setattr(calibrate, "_ROUNDS", 1)


def test_the_rate_that_it_measures_is_the_one_that_plan_uses(twoends, tmp_path):
    found = json.loads(twoends("doctor", "--disk", tmp_path, "--json").out)
    assert device.rate_under(tmp_path).bytes_per_s == found["disk"]["bytes_per_s"] > 0


def test_the_passes_that_it_measures_are_those_that_plan_uses(twoends, tmp_path):
    found = json.loads(twoends("doctor", "--disk", tmp_path, "--json").out)
    kernels = found["kernels"]
    if kernels["isa"] is None:
        assert found["compute"] is None
        return
    kept = calibration.kept_compute(tmp_path, isa=kernels["isa"], threads=kernels["threads"])
    assert kept.as_object() == found["compute"]


def test_where_memory_is_short_passes_are_not_measured_and_it_says_so(twoends, monkeypatch):
    monkeypatch.setattr(doctor_machine, "available_bytes", lambda: 900_000_000)
    result = twoends("doctor")
    assert result.code == 0
    assert "passes         not measured" in result.out or "passes    not measured" in result.out


def test_it_leaves_no_file_behind(twoends, tmp_path):
    place = tmp_path / "place"
    place.mkdir()
    assert twoends("doctor", "--disk", place).code == 0
    assert list(place.iterdir()) == []


def test_weights_that_are_there_are_read_and_nothing_is_written(twoends, tmp_path, monkeypatch):
    monkeypatch.setattr(disks.tempfile, "NamedTemporaryFile", None)
    for name in ("model-1.safetensors", "model-2.safetensors"):
        (tmp_path / name).write_bytes(bytes(16 * 2**20))
    found = json.loads(twoends("doctor", "--disk", tmp_path, "--json").out)
    assert found["disk"]["read"] == "2 weight files"
    assert found["disk"]["bytes_per_s"] > 0


def test_few_weights_count_as_none_and_it_says_what_was_read(twoends, tmp_path):
    place = tmp_path / "place"
    place.mkdir()
    (place / "model.safetensors").write_bytes(bytes(16 * 2**20))
    found = json.loads(twoends("doctor", "--disk", place, "--json").out)
    assert found["disk"]["read"] == disks.JUST_WRITTEN
    assert [path.name for path in place.iterdir()] == ["model.safetensors"]


def test_a_trial_goes_on_where_the_last_one_stopped(tmp_path):
    paths = [tmp_path / "a", tmp_path / "b"]
    for path, size in zip(paths, (3 * 4096, 2 * 4096 + 1), strict=True):
        path.write_bytes(bytes(size))
    walk = disks._walk(disks.WeightFiles(paths), 4096)
    places = [(0, 0), (0, 4096), (0, 8192), (1, 0), (1, 4096)]
    assert [next(walk) for _ in range(7)] == [*places, *places[:2]]


def test_the_last_line_is_the_next_command(twoends):
    result = twoends("doctor")
    assert result.code == 0
    assert result.out.splitlines()[-1].startswith("  Next:  twoends plan MODEL --ram ")


def test_every_operation_is_listed(twoends):
    found = json.loads(twoends("doctor", "--kernels", "reference", "--json").out)
    assert len(found["kernels"]["operations"]) == len(Ops.__dataclass_fields__) - 1
    assert set(found["kernels"]["operations"].values()) == {"reference"}


def test_kernels_that_are_wrong_are_said_last_and_exit_4(twoends, monkeypatch):
    def unsound(values):
        raise NotSound("the native 'matmul' differs from the reference.")

    monkeypatch.setattr(load, "choose_kernels", unsound)
    result = twoends("doctor")
    assert result.code == 4
    assert "kernels   NOT USABLE, see below" in result.out
    assert result.err == "twoends: the native 'matmul' differs from the reference.\n"


def test_a_directory_that_is_not_there_is_refused(twoends):
    result = twoends("doctor", "--disk", "/no/such")
    assert result.code == 2
    assert result.err.startswith("twoends: --disk: /no/such can't be measured: No such file or directory.\n")
