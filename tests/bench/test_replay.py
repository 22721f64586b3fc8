"""Replay: the engine's own policy asked as the engine asks it, and what two real traces are known to give."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.opened import generate, opened
from tests.support.routing import KINDS, synthetic_trace
from tests.support.running import PROMPT
from twoends.bench.replay import engine_hits, replay
from twoends.bench.replay_policies import belady_hits, lfu_hits, lru_hits, s3fifo_hits
from twoends.bench.traces import read_trace
from twoends.engine.split import MIN_SLOTS
from twoends.generate.generator import Generator

DATA = Path(__file__).parents[3] / "shared" / "data" / "routing"
K3 = DATA / "kimi_k3_reprefill.bin"
LINEAR = DATA / "kimi_linear_300_tokens.jsonl"
real = pytest.mark.skipif(not DATA.is_dir(), reason="the real traces (../shared/data/routing) are not here")


@pytest.fixture(scope="module")
def k3():
    return read_trace(K3)


@pytest.fixture(scope="module")
def linear():
    """A hundred tokens, to be quick; the figures of all 300 are in docs/log.md."""
    return read_trace(LINEAR).first_tokens(100)


@pytest.mark.parametrize("chunk", [1, 5])
def test_a_replay_hits_as_often_as_the_run_that_wrote_the_trace(nano_checkpoints, tmp_path, chunk):
    path = tmp_path / "t.jsonl"
    with opened(nano_checkpoints["kimi-k3"], budget=0.3, chunk=chunk, trace=path) as model:
        generate(Generator(model, list(PROMPT), chunk=chunk), 12)
    counters, slots = model.counters, model.plan.num_slots
    trace = read_trace(path)
    assert len(trace.requests()) == counters.expert_requests
    assert 0 < engine_hits(trace, slots) == counters.expert_hits


def test_a_report_has_a_row_per_capacity_smallest_first(tmp_path):
    path = tmp_path / "t"
    path.write_text("".join(json.dumps({"layers": [[1, 2], [3, 4]]}) + "\n" for _ in range(5)))
    rows = []
    report = replay(read_trace(path), capacities=[2, 0.5, 0.5], row_done=rows.append)
    assert [row.slots for row in report.rows] == [2, 8]
    assert tuple(rows) == report.rows
    assert (report.num_requests, report.ceiling_hits) == (20, 16)
    assert report.rows[1].hits == {"lru": 16, "lfu": 16, "s3fifo": 16, "ours": 16, "belady": 16}
    assert report.as_json()["rows"][0]["share_of_belady"] == report.rows[0].share_of_belady


@real
@pytest.mark.parametrize("slots", [455, 1823, 3647])
def test_lru_on_the_whole_reprefill_trace_hits_as_published(slots):
    """36.24 % from 8 to 64 GB, because every prefix is read again."""
    requests = read_trace(K3, order="file").requests()
    assert len(requests) == 100_096
    assert len(set(requests)) == 10_010
    assert round(100 * lru_hits(requests, slots) / len(requests), 2) == 36.24


@real
def test_belady_on_the_whole_reprefill_trace_hits_as_published():
    requests = read_trace(K3, order="file").requests()
    shares = [round(100 * belady_hits(requests, slots) / len(requests), 2) for slots in (455, 3647)]
    assert shares == [39.42, 61.74]


@real
def test_lru_in_decode_order_hits_nothing_below_one_token_cycle(k3):
    """Published: exactly 0 until 1,472 slots."""
    requests = k3.requests()
    assert (k3.cycle_slots, k3.num_tokens, len(requests)) == (1472, 12, 17_664)
    assert lru_hits(requests, 1471 - 16) == 0
    assert lru_hits(requests, 1481) > 0.2 * len(requests)


@real
@pytest.mark.parametrize(("slots", "percent"), [(227, 3.6), (455, 8.0), (911, 13.6), (1481, 19.5)])
def test_lfu_in_decode_order_hits_as_published(k3, slots, percent):
    assert round(100 * lfu_hits(k3.requests(), slots) / 17_664, 1) == percent


@real
@pytest.mark.parametrize("cycles", [0.25, 0.5, 1, 2])
@pytest.mark.parametrize("name", ["k3", "linear"])
def test_ours_has_most_of_what_could_be_had_and_is_never_below_lru_or_s3fifo(request, name, cycles):
    """The bar: 55 % of Belady's hits; one set of constants for both."""
    trace = request.getfixturevalue(name)
    requests, slots = trace.requests(), int(cycles * trace.cycle_slots)
    ours = engine_hits(trace, slots)
    assert ours >= 0.55 * belady_hits(requests, slots)
    assert ours >= max(lru_hits(requests, slots), s3fifo_hits(requests, slots))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranked", [True, False])
def test_no_kind_of_routing_is_served_worse_than_by_lru_or_s3fifo(kind, ranked):
    """One set of constants, no tuning: flat, local, skewed, drifting, topics, texts in turn, no reuse."""
    trace = synthetic_trace(kind, ranked=ranked, tokens=80, layers=8, experts=48, chosen=4)
    requests = trace.requests()
    for cycles in (0.5, 1, 1.5):
        slots = int(cycles * trace.cycle_slots)
        assert engine_hits(trace, slots) >= max(lru_hits(requests, slots), s3fifo_hits(requests, slots))


def test_a_thousand_tokens_in_the_fewest_slots_hit_little_and_end():
    trace = synthetic_trace("local", tokens=1000, layers=4, experts=24, chosen=4)
    assert 0 < engine_hits(trace, MIN_SLOTS) < 0.3 * len(trace.requests())


@real
def test_the_linear_trace_is_not_taken_for_ranked(linear):
    assert (linear.ranked, linear.cycle_slots, linear.num_experts) == (False, 208, 256)
