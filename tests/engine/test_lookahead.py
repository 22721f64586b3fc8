"""Guesses: what is read on them, what becomes of it, and when none is made."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.engine.harness import bytes_of, make_read, pattern
from tests.support.backends import native_isas
from tests.support.opened import generate
from tests.support.running import PROMPT, make_ops, plan_of, run
from twoends.engine.files import read_at
from twoends.engine.open import OpenModel
from twoends.engine.recall import Recall
from twoends.errors import ReadError
from twoends.generate.generator import Generator

FAMILIES = ("kimi-k3", "kimi-linear")
ISA = native_isas()[0] if native_isas() else "reference"
# Pins the trunk of a nano model, with slots for some experts.
WHOLE_TRUNK = 5.0


def recall(*, always=False):
    return Recall(num_layers=2, num_ranks=3, always=always)


def test_a_rank_is_read_once_it_was_seen_to_come_true_and_no_longer_when_it_stops():
    found = recall()
    assert not found.is_worth_reading(0, 0), "nothing is known yet"
    for _ in range(6):
        found.learn(0, 0, right=True)
        found.learn(0, 1, right=False)
    assert found.is_worth_reading(0, 0)
    assert not found.is_worth_reading(0, 1)
    assert not found.is_worth_reading(1, 0), "each layer has its own counts"
    for _ in range(40):
        found.learn(0, 0, right=False)
    assert not found.is_worth_reading(0, 0)


def test_a_layer_that_never_comes_true_is_asked_again_now_and_then():
    found = recall()
    for rank in range(3):
        for _ in range(10):
            found.learn(0, rank, right=False)
    asked = [found.is_worth_asking(0) for _ in range(80)]
    assert asked.count(True) == 10
    assert found.is_worth_asking(1)


def test_always_reads_whatever_was_learnt():
    found = recall(always=True)
    for _ in range(10):
        found.learn(0, 0, right=False)
    assert found.is_worth_reading(0, 0)
    assert found.is_worth_asking(0)


def reader_with_one_thread(harness, data):
    gate = harness.gate()
    reader = harness.reader(harness.file(data), read=gate, depth=1)
    gate.offsets.clear()
    return reader, gate


def test_guesses_come_after_demands_and_after_the_trunk(harness):
    data = pattern(5 * 4096)
    reader, gate = reader_with_one_thread(harness, data)
    first, guess, ahead, demand = (make_read(i * 4096, 4096) for i in range(4))
    reader.submit(first, demand=True)
    assert gate.began.acquire(timeout=20)
    reader.submit(guess, demand=False, guess=True)
    reader.submit(ahead, demand=False)
    reader.submit(demand, demand=True)
    gate.open()
    for read in (guess, ahead, demand):
        reader.wait(read)
    assert gate.offsets[-4:] == [0, 3 * 4096, 2 * 4096, 4096]
    assert bytes_of(guess) == data[4096:8192]


def test_a_guess_that_comes_true_is_hurried_past_the_trunk(harness):
    reader, gate = reader_with_one_thread(harness, pattern(5 * 4096))
    first, guess, ahead = (make_read(i * 4096, 4096) for i in range(3))
    reader.submit(first, demand=True)
    assert gate.began.acquire(timeout=20)
    reader.submit(guess, demand=False, guess=True)
    reader.submit(ahead, demand=False)
    reader.hurry(guess)
    gate.open()
    reader.wait(ahead)
    assert gate.offsets[-3:] == [0, 4096, 2 * 4096]


def test_a_guess_that_no_thread_has_begun_is_withdrawn_and_not_counted(harness):
    reader, gate = reader_with_one_thread(harness, pattern(5 * 4096))
    first, guess, after = make_read(0, 4096), make_read(4096, 4096, kind="experts"), make_read(8192, 4096)
    reader.submit(first, demand=True)
    assert gate.began.acquire(timeout=20)
    reader.submit(guess, demand=False, guess=True)
    assert harness.counters.bytes_experts == 4096
    assert reader.withdraw(guess) == 4096
    assert (harness.counters.bytes_experts, guess.pending) == (0, 0)
    assert reader.withdraw(first) == 0, "what has begun goes on"
    reader.submit(after, demand=False)
    gate.open()
    reader.wait(after)
    assert 4096 not in gate.offsets


@pytest.mark.parametrize("family", FAMILIES)
def test_the_trace_tells_of_every_guess_what_became_of_it(nano_checkpoints, tmp_path, family):
    path = tmp_path / "t.jsonl"
    found = run(
        nano_checkpoints[family],
        ops=make_ops(ISA),
        num_new=20,
        chunk=5,
        budget=WHOLE_TRUNK,
        look_ahead="on",
        trace=path,
    )
    events = [json.loads(line) for line in path.read_text().splitlines()]
    read = sum(len(event["read"]) for event in events if event["event"] == "guess")
    ends = [event["outcome"] for event in events if event["event"] == "guessed"]
    counters = found.counters
    assert read == len(ends) == counters.guesses_read > 0
    assert ends.count("useful") == counters.guesses_useful
    assert ends.count("late") == counters.guesses_late
    assert ends.count("wasted") == counters.guesses_wasted
    assert max(len(event["read"]) for event in events if event["event"] == "guess") <= found.plan.guess_rooms


@pytest.mark.parametrize("family", FAMILIES)
def test_passes_of_several_rows_guess_nothing(nano_checkpoints, family):
    plan = plan_of(nano_checkpoints[family], budget=WHOLE_TRUNK, chunk=4, look_ahead="on")
    model = OpenModel(nano_checkpoints[family], plan, make_ops(ISA), look_ahead="on", poison=True)
    try:
        for _ in range(3):
            model.run_pass([5, 17, 300, 42], layer_done=lambda done: None)
        assert (model.counters.choices_guessed, model.counters.guesses_read) == (0, 0)
        model.run_pass([7], layer_done=lambda done: None)
        assert model.counters.guesses_read > 0
    finally:
        model.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_guess_is_no_hit_and_what_came_true_is_not_read_again(nano_checkpoints, family):
    """Hits are the policy's alone; how reads and uses interleave moves them a little from run to run."""
    with_rooms = plan_of(nano_checkpoints[family], budget=WHOLE_TRUNK, chunk=4, look_ahead="on")
    hits = []
    for mode in ("on", "auto"):
        model = OpenModel(nano_checkpoints[family], with_rooms, make_ops(ISA), look_ahead=mode, poison=True)
        try:
            generate(Generator(model, list(PROMPT), chunk=4), 25)
        finally:
            model.close()
        counters = model.counters
        hits.append((counters.expert_requests, counters.expert_hits))
        wanted = counters.expert_requests - counters.expert_hits + counters.guesses_wasted
        assert counters.bytes_experts == pytest.approx(wanted * with_rooms.expert_bytes_per_request, rel=0.05)
    assert hits[0][0] == hits[1][0]
    assert hits[0][1] == pytest.approx(hits[1][1], rel=0.05)


def test_a_model_whose_guesses_are_wrong_reads_none_of_them_in_auto(nano_checkpoints, monkeypatch):
    """Guesses turned upside down: auto measures that and stops; on goes on wasting, and says so."""
    checkpoint = nano_checkpoints["kimi-k3"]
    sort = np.argsort
    monkeypatch.setattr(
        "twoends.engine.lookahead.np.argsort", lambda score_E, **kw: sort(score_E, **kw)[::-1]
    )
    options = {"ops": make_ops(ISA), "num_new": 40, "chunk": 12, "budget": WHOLE_TRUNK}
    auto = run(checkpoint, look_ahead="auto", **options).counters
    always = run(checkpoint, look_ahead="on", **options).counters
    assert auto.choices_right < 0.5 * auto.choices_guessed
    assert auto.guesses_read < 0.2 * always.guesses_read
    assert auto.bytes_wasted < 0.2 * always.bytes_wasted


def test_a_read_that_fails_on_a_guess_that_is_needed_ends_the_run(nano_checkpoints):
    checkpoint = nano_checkpoints["kimi-k3"]
    paths = {}

    def failing(fd, buffer, offset):
        paths[fd] = paths.get(fd, 0) + 1
        if sum(paths.values()) > 150:
            raise OSError(5, "Input/output error")
        return read_at(fd, buffer, offset)

    with pytest.raises(ReadError):
        run(
            checkpoint,
            ops=make_ops(ISA),
            num_new=40,
            chunk=12,
            budget=WHOLE_TRUNK,
            look_ahead="on",
            read=failing,
        )


@pytest.mark.parametrize(
    ("budget", "mode", "reason"),
    [
        (WHOLE_TRUNK, "off", "off"),
        ("ample", "on", "on: every expert has room, and is read before it is asked for"),
        ("floor", "on", "off: no room for routers (45.1 KB) and guesses (86.0 KB)"),
        (1.5, "auto", "of trunk a token leave the disk no time for guesses"),
    ],
)
def test_without_guesses_the_plan_says_why(nano_checkpoints, budget, mode, reason):
    plan = plan_of(nano_checkpoints["kimi-k3"], budget=budget, look_ahead=mode)
    assert plan.guess_rooms == 0
    assert reason in plan.look_ahead
    assert not [row for row in plan.rows if row.name == "look-ahead"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("budget", [0.8, 1.5, WHOLE_TRUNK])
def test_guesses_hold_what_their_row_says_within_the_budget(nano_checkpoints, family, budget):
    plan = plan_of(nano_checkpoints[family], budget=budget, look_ahead="on")
    assert plan.total_bytes <= plan.ram_bytes
    model = OpenModel(nano_checkpoints[family], plan, make_ops(ISA), look_ahead="on")
    try:
        generate(Generator(model, list(PROMPT), chunk=plan.chunk_tokens), 4)
        kept = sum(
            array.nbytes for layer in model._look_ahead._kept.values() for array in layer.vectors.values()
        )
        row = next(row for row in plan.rows if row.name == "look-ahead")
        assert row.num_bytes >= kept + plan.guess_rooms * plan.slot_bytes
        assert model._slots.num_bytes <= (plan.num_slots + plan.guess_rooms) * plan.slot_bytes + 4096
    finally:
        model.close()
