"""`twoends bench predict`: said before the runs, from doctor's figures; hits are exact."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from twoends.bench.ladder import RungRow
from twoends.bench.replay import engine_passes
from twoends.bench.report import Spread
from twoends.bench.traces import read_trace
from twoends.checkpoint.tiny import write_tiny
from twoends.cli.bench_predict import GOOD, Prediction, errors_of
from twoends.engine.device import DiskRate, keep_rate
from twoends.kernels.built import is_built
from twoends.kernels.choose import choose
from twoends.sizing.calibration import ComputeRate, keep_compute
from twoends.sizing.estimate import Estimate

big = pytest.mark.skipif("not config.getoption('--big')", reason="--big was not given")
native = pytest.mark.skipif(not is_built(), reason="the native kernels are not built")

WORDS = ("--rungs", "300MB,400MB", "--repeat", "1", "-n", "6", "--cap", "none")


@pytest.fixture
def measured(tmp_path):
    """As if doctor had been here."""
    choice = choose(threads=None, isa=os.environ.get("TWOENDS_ISA"), kernels="native")
    disk = DiskRate(bytes_per_s=1e9, date="2026-11-30", is_direct=True, piece_bytes=4 * 2**20, depth=4)
    rate = ComputeRate(
        isa=choice.isa, threads=choice.threads, bf16_bytes_per_s=10e9, mxfp4_bytes_per_s=5e9, layer_s=1e-4,
        reading_bytes_per_s=1e9, date="2026-11-30",
    )  # fmt: skip
    keep_rate(tmp_path, disk)
    keep_compute(tmp_path, rate)


@native
def test_without_doctors_figures_nothing_is_predicted(twoends, nano):
    result = twoends("bench", "predict", nano, *WORDS)
    assert result.code == 1
    assert "a prediction needs doctor's figures of the disk" in result.err
    assert "twoends doctor --disk" in result.err


@native
def test_where_every_expert_has_a_slot_all_hits_are_predicted(twoends, nano, measured):
    found = json.loads(twoends("bench", "predict", nano, *WORDS, "--json").out)
    assert [prediction["hit_share"] for prediction in found["predictions"]] == [1.0, 1.0]
    assert [row["ram_bytes"] for row in found["rows"]] == [300_000_000, 400_000_000]
    assert set(found["errors"]) == {"300000000", "400000000"}


@native
def test_the_replay_of_a_trace_has_the_hits_of_the_run_to_the_request(nano, tmp_path):
    trace = tmp_path / "trace.jsonl"
    words = ("--ids", "1,2,3,4,5,6,7,8", "-n", "6", "--ram", "400MB", "--look-ahead", "off")
    command = (sys.executable, "-m", "twoends", "run", nano, *words, "--trace", trace, "--json")
    run = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    passes = engine_passes(read_trace(trace), run["plan"]["num_slots"])
    assert sum(requests for requests, _ in passes) == run["expert_requests"]
    assert sum(hits for _, hits in passes) == run["expert_hits"] > 0


@native
def test_what_was_said_before_stands_above_what_was_measured(twoends, nano, measured):
    lines = twoends("bench", "predict", nano, *WORDS).out.splitlines()
    said = next(i for i, line in enumerate(lines) if "arithmetic" in line)
    runs = next(i for i, line in enumerate(lines) if "now the runs" in line)
    compared = next(i for i, line in enumerate(lines) if "measured" in line)
    assert said < runs < compared
    assert max(map(len, lines)) <= 80
    assert "of 2 rungs within 15 % of the run's median" in lines[-1]


def spread(median: float) -> Spread:
    """One measurement."""
    return Spread(median=median, low=median, high=median, repeats=1)


@pytest.mark.parametrize(
    ("predicted", "run", "error"), [(0.115, 0.1, 0.15), (0.05, 0.1, -0.5), (0.1, 0.1, 0.0)]
)
def test_an_error_is_the_share_by_which_the_prediction_is_above_the_run(predicted, run, error):
    middle = Estimate(read_bytes=1, reading_s=1.0, arithmetic_s=1.0, demanded_s=0.0, seconds=1.0)
    made = Prediction(ram_bytes=7, hit_share=0.5, token_s=spread(predicted), middle=middle)
    row = RungRow(ram_bytes=7, trouble=None, token_s=spread(run))
    assert errors_of([made], [row]) == {7: pytest.approx(error)}


@big
@native
def test_predictions_for_mini_are_within_15_percent_of_a_run(twoends, tmp_path):
    # judged on a machine that nobody else uses: doctor first, then the predictions, then the runs
    mini = tmp_path / "mini"
    mini.mkdir()
    write_tiny(mini, preset="mini", seed=1)
    assert twoends("doctor", "--disk", tmp_path).code == 0
    words = ("--rungs", "172MB,400MB,620MB,2GB", "--repeat", "3", "-n", "32", "--ids", "5,17,300,42,63")
    found = json.loads(twoends("bench", "predict", mini, *words, "--json").out)
    assert len(found["errors"]) == 4
    assert {ram: error for ram, error in found["errors"].items() if abs(error) > GOOD} == {}
