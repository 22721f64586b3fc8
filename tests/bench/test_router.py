"""The report on a router: figures of traces whose answer is known."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from twoends.bench.router import router_report
from twoends.bench.traces import RoutingTrace, Step
from twoends.cli.main import call


def _trace(*layers: list[list[int]]) -> RoutingTrace:
    """Layers of [token][choice], as decoding goes through them: token by token."""
    steps = [
        Step(layer=layer, ids_TS=np.array([tokens[t]], np.int32))
        for t in range(len(layers[0]))
        for layer, tokens in enumerate(layers, 1)
    ]
    return RoutingTrace(form="ours", steps=tuple(steps), ranked=True, fingerprint="x")


def test_a_router_that_never_changes_its_mind_reuses_everything() -> None:
    report = router_report(_trace([[0, 1]] * 9), num_experts=8)
    assert report.reuse == 1
    assert report.max_violation == pytest.approx(8 / 2 - 1)
    assert report.unused_experts == 6 / 8
    assert report.reuse_if_independent == pytest.approx(1)
    assert report.reuse_if_even == 2 / 8
    assert report.hits[1.0]["lru"] == 16 / 18


def test_a_router_that_walks_in_a_circle_is_even_and_reuses_nothing() -> None:
    report = router_report(_trace([[(2 * t) % 8, (2 * t + 1) % 8] for t in range(16)]), num_experts=8)
    assert (report.reuse, report.max_violation, report.unused_experts) == (0, 0, 0)
    assert report.reuse_if_independent == pytest.approx(report.reuse_if_even)
    assert report.hits[1.0]["lru"] == 0


def test_draws_without_memory_reuse_what_their_load_says() -> None:
    """2,000 draws of 2 of 16 by unequal chances: the standard error of the reuse is 0.4 %."""
    random = np.random.default_rng(1)
    chances = np.arange(1, 17) / np.arange(1, 17).sum()
    tokens = [random.choice(16, 2, replace=False, p=chances).tolist() for _ in range(2000)]
    report = router_report(_trace(tokens))
    assert report.reuse == pytest.approx(report.reuse_if_independent, abs=0.02)


def test_order_within_a_token_does_not_count() -> None:
    assert router_report(_trace([[0, 1], [1, 0], [0, 1]])).reuse == 1


def test_the_command_sets_traces_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = []
    for name, ids in (("same", [[0, 1]]), ("other", [[2, 3]])):
        events = [{"event": "model", "fingerprint": "x"}]
        events += [{"event": "route", "layer": 1, "ids": ids}] * 3
        paths.append(tmp_path / f"{name}.jsonl")
        paths[-1].write_text("".join(json.dumps(event) + "\n" for event in events))
    words = ["bench", "router", str(paths[0]), "--also", str(paths[1])]
    assert call([*words, "--json"], environment={}) == 0
    assert list(json.loads(capsys.readouterr().out)) == [str(path) for path in paths]
    assert call(words, environment={}) == 0
    assert "100.0 %" in capsys.readouterr().out
