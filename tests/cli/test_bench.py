"""`twoends bench replay` and `ladder`: their screens, their files, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.limits import run_limited
from twoends.bench.limits import Ended, try_cap
from twoends.cli import bench_ladder, bench_replay
from twoends.engine.open import Checkpoint


def trace_of(twoends, nano, tmp_path):
    path = tmp_path / "t.jsonl"
    assert twoends("run", nano, "--ids", "5,17,300", "-n", 12, "--trace", path).code == 0
    return path


def test_replay_draws_a_row_per_capacity_within_80_columns(twoends, nano, tmp_path):
    result = twoends("bench", "replay", trace_of(twoends, nano, tmp_path), "--capacities", "1/2,1,8")
    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    assert max(map(len, lines)) <= 80
    at = next(i for i, line in enumerate(lines) if "Belady" in line)
    assert [line.split()[0] for line in lines[at + 1 : at + 4]] == ["0.5", "1", "8"]
    assert "ours hits" in lines[-1]


def test_replay_as_json_has_the_same_figures_and_nothing_else_on_stdout(twoends, nano, tmp_path):
    path = trace_of(twoends, nano, tmp_path)
    found = json.loads(twoends("bench", "replay", path, "--capacities", "1,2", "--json").out)
    assert [row["cycles"] for row in found["rows"]] == [1, 2]
    assert found["ranked"] is True
    assert all(0 <= count <= found["ceiling_hits"] for row in found["rows"] for count in row["hits"].values())


def test_replay_of_another_models_trace_is_refused(twoends, nano, nano_dirs, tmp_path):
    path = trace_of(twoends, nano, tmp_path)
    assert twoends("bench", "replay", path, "--capacities", "1", "--model", nano).code == 0
    result = twoends("bench", "replay", path, "--model", nano_dirs["kimi-linear"])
    assert result.code == 2
    assert result.err.startswith("twoends: t.jsonl is not a trace of this model.\n")
    assert Checkpoint.open(nano).index.fingerprint in result.err


def test_without_matplotlib_the_plot_is_made_of_characters(twoends, nano, tmp_path, monkeypatch):
    monkeypatch.setattr(bench_replay, "can_draw", lambda: False)
    path = trace_of(twoends, nano, tmp_path)
    result = twoends("bench", "replay", path, "--capacities", "1/2,1,2,4", "--plot", tmp_path / "p.png")
    assert "matplotlib is not installed" in result.err
    assert "o LRU   x LFU   + S3-FIFO   * ours   # Belady" in result.out
    assert max(map(len, result.out.splitlines())) <= 80
    assert not (tmp_path / "p.png").exists()


def test_with_matplotlib_the_plot_is_a_picture(twoends, nano, tmp_path):
    pytest.importorskip("matplotlib")
    path = trace_of(twoends, nano, tmp_path)
    assert twoends("bench", "replay", path, "--capacities", "1,2", "--plot", tmp_path / "p.svg").code == 0
    assert "<svg" in (tmp_path / "p.svg").read_text()


def rungs_of(nano):
    """A budget that is too small, one just above the floor of a process of its own, and an ample one."""
    plan = run_limited(["plan", str(nano), "--context", "12", "--ram", "400MB", "--json"]).json()
    return f"10MB,{plan['floor_bytes'] + 1_000_000},400MB"


def test_a_ladder_of_real_runs_gives_the_same_ids_on_every_rung(twoends, nano):
    """With the limit that this machine can enforce, or none."""
    cap = "none" if try_cap("cgroup") else "cgroup"
    words = ("--rungs", rungs_of(nano), "--repeat", 1, "-n", 4, "--cap", cap)
    result = twoends("bench", "ladder", nano, *words, "--out", "l.json")
    assert (result.code, result.err) == (0, "")
    assert "10.0 MB below the floor: this model needs at least" in result.out
    assert "2 rungs, 2 runs: every run gave the same 4 ids." in result.out
    assert max(map(len, result.out.splitlines())) <= 80
    found = json.loads(Path("l.json").read_text())
    assert found["machine"]["cores"] >= 1
    assert [row["is_below_floor"] for row in found["rows"]] == [True, False, False]
    assert found["rows"][1]["logits_digest"] == found["rows"][2]["logits_digest"]
    assert found["rows"][1]["read_bytes_per_pass"] > found["rows"][2]["read_bytes_per_pass"]
    if cap == "cgroup":
        assert all(row["group_peak_bytes"] <= row["ram_bytes"] for row in found["rows"][1:])


def run_object(ids):
    return {
        "ids": ids,
        "prompt_ids": [1],
        "ids_digest": "b2:00000000",
        "logits_digest": "0" * 64,
        "token_s": [31.9, 32.7, 33.4],
        "bytes_read": 538_400_000_000,
        "expert_requests": 10,
        "expert_hits": 4,
        "peak_rss_bytes": 7_910_000_000,
        "plan": {"window_bytes": 3_500_000_000, "pinned_bytes": 3, "num_slots": 82_432, "chunk_tokens": 1},
    }


@pytest.fixture
def made_up_runs(monkeypatch):
    """Puts ends of runs in the place of runs."""

    def put(*ends):
        left = [ended(1), *ends]  # the plan's floor is not known
        climb = bench_ladder.climb
        monkeypatch.setattr(
            bench_ladder, "climb", lambda *a, **k: climb(*a, **k, launch=lambda words, limit: left.pop(0))
        )

    return put


def ended(code=0, ids=(5, 6, 7, 8)):
    stdout = "" if code else json.dumps(run_object(list(ids)))
    return Ended(code=code, stdout=stdout, stderr="", peak_bytes=None, hits=None)


LADDER = ("--rungs", "8GB,16GB", "--repeat", 1, "-n", 4, "--cap", "none")


def test_ids_that_differ_are_named_with_their_token_and_exit_4(twoends, nano, made_up_runs):
    made_up_runs(ended(), ended(ids=(5, 6, 9, 8)))
    result = twoends("bench", "ladder", nano, *LADDER)
    assert result.code == 4
    assert "DIFFERENT at 3" in result.out
    assert "1 rung gave other ids or logits. The claim FAILS." in result.out
    assert "ids or logits differ on 1 of 2 rungs" in result.err
    assert max(map(len, result.out.splitlines())) <= 80


def test_a_run_that_was_killed_broke_the_promise_and_exits_4(twoends, nano, made_up_runs):
    made_up_runs(ended(), ended(-9))
    result = twoends("bench", "ladder", nano, *LADDER)
    assert result.code == 4
    assert "FAILED: killed by signal 9" in result.out
    assert "a run took more than its budget on 1 of 2 rungs" in result.err


def test_a_ladder_as_json_is_one_object_and_the_file_has_the_same(twoends, nano, made_up_runs):
    made_up_runs(ended(), ended())
    result = twoends("bench", "ladder", nano, *LADDER, "--json")
    assert json.loads(result.out)["rungs_different"] == 0
    assert json.loads(Path("ladder.json").read_text()) == json.loads(result.out)


def test_where_no_limit_holds_no_table_is_made(twoends, nano, monkeypatch):
    monkeypatch.setattr(bench_ladder, "try_cap", lambda cap: f"{cap} does nothing here")
    result = twoends("bench", "ladder", nano, "--rungs", "8GB,16GB")
    assert result.code == 1
    assert "no memory limit can be enforced here" in result.err
    assert "rlimit   rlimit does nothing here" in result.err
    assert "budget" not in result.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--cap", "none"), "a ladder needs two rungs at least"),
        (("--rungs", "8GB"), "a ladder needs two rungs at least"),
        (("--rungs", "8GB,8XB"), "--rungs: '8XB' is not a size."),
        (("--rungs", "1GB,2GB", "--ids", "999999999"), "--ids: 999,999,999 is outside the vocabulary"),
        (("--rungs", "1GB,2GB", "--out", "/no/such/l.json"), "--out: /no/such/l.json can't be written"),
    ],
)
def test_what_a_ladder_is_asked_wrongly_is_refused_before_any_run(twoends, nano, words, message):
    result = twoends("bench", "ladder", nano, *words)
    assert (result.code, result.out) == (2, "")
    assert message in result.err
