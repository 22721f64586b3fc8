"""The trace: every byte, hit and pass of a run is in it, and it never costs a run its answer silently."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import pytest

from tests.support.opened import generate, opened
from tests.support.running import PROMPT
from twoends.engine.trace import Trace
from twoends.errors import DoesNotFit
from twoends.generate.generator import Generator

NUM_NEW = 5


@pytest.fixture(scope="module")
def traced(nano_checkpoints, tmp_path_factory):
    """(events, counters) of a run in little memory."""
    path = tmp_path_factory.mktemp("trace") / "t.jsonl"
    with opened(nano_checkpoints["kimi-k3"], budget=0.3, chunk=5, trace=path) as model:
        generate(Generator(model, list(PROMPT), chunk=5), NUM_NEW)
    return [json.loads(line) for line in path.read_text().splitlines()], model.counters


def test_reads_of_the_trace_sum_to_the_counters(traced):
    events, counters = traced
    found = Counter()
    for event in events:
        if event["event"] == "read":
            found[event["kind"]] += event["bytes"]
    assert found == {
        "trunk": counters.bytes_trunk,
        "experts": counters.bytes_experts,
        "embedding": counters.bytes_embedding,
    }


def test_hits_and_misses_of_the_trace_are_the_counted_requests(traced):
    events, counters = traced
    found = Counter(event["event"] for event in events)
    assert found["hit"] == counters.expert_hits > 0
    assert found["hit"] + found["miss"] == counters.expert_requests
    assert 0 < found["evict"] < found["miss"]


def test_passes_and_routes_tell_what_went_through(traced, nano_checkpoints):
    events, _ = traced
    passes = [(e["position"], e["tokens"]) for e in events if e["event"] == "pass"]
    assert passes == [(0, 5), (5, 5), (10, 2), (12, 1), (13, 1), (14, 1), (15, 1)]
    config = nano_checkpoints["kimi-k3"].config
    routes = [e for e in events if e["event"] == "route"]
    assert [e["layer"] for e in routes] == list(config.moe_layers) * len(passes)
    for event, (_, tokens) in zip(routes[:: len(config.moe_layers)], passes, strict=True):
        assert len(event["ids"]) == tokens
        assert all(len(set(ranks)) == config.experts_per_token for ranks in event["ids"])


def test_no_panel_is_read_twice_in_one_pass(traced):
    """Small neighbours may share a page, so a panel is told apart by its first byte and its size."""
    events, _ = traced
    trunk = [e for e in events if e["event"] == "read" and e["kind"] == "trunk"]
    reads = Counter((e["file"], e["offset"], e["bytes"]) for e in trunk)
    num_passes = sum(e["event"] == "pass" for e in events)
    assert max(reads.values()) <= num_passes
    assert min(reads.values()) == 1, "what is pinned is read once in the whole run"


def test_time_never_runs_backwards(traced):
    events, _ = traced
    times = [event["t_s"] for event in events]
    assert times == sorted(times)
    assert events[0]["event"] == "model"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no device that is always full")
@pytest.mark.parametrize("num_events", [1, 2000])
def test_a_full_disk_is_named_once_and_closing_is_then_quiet(num_events):
    """With one event the disk is met at close, with many while the run goes on."""
    trace = Trace(Path("/dev/full"))

    def run():
        for k in range(num_events):
            trace.event("pass", position=k, tokens=1)
        trace.close()

    with pytest.raises(DoesNotFit, match="the trace can't be written to /dev/full: No space left"):
        run()
    trace.close()
    assert not trace.on
