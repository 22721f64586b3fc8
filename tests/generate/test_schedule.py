"""The scheduler: who runs when. That it changes no bit is in tests/contract/test_same_bits.py."""

from __future__ import annotations

import json

import pytest

from tests.support.backends import native_isas
from tests.support.running import PROMPT, make_ops, run
from tests.support.together import open_shared, request, run_together
from twoends.errors import DoesNotFit
from twoends.generate.schedule import Scheduler

FAMILIES = ("kimi-k3", "kimi-linear")
ISA = (native_isas() or ["reference"])[0]


@pytest.fixture
def checkpoint(nano_checkpoints):
    return nano_checkpoints["kimi-k3"]


def passes_of(trace):
    events = [json.loads(line) for line in trace.read_text().splitlines()]
    return [(e["tokens"], e["sequences"]) for e in events if e["event"] == "pass"]


def test_prompts_and_texts_share_passes_within_the_rows_that_are_planned(checkpoint, tmp_path):
    made = [request(checkpoint, 0, range(3), 6), request(checkpoint, 1, range(10, 30), 2)]
    run_together(checkpoint, made, ops=make_ops(ISA), sequences=2, chunk=8, trace=tmp_path / "t")
    # 3 + 5 rows of the prompts; then one of the first text and seven of the second prompt; then texts.
    assert passes_of(tmp_path / "t") == [(8, 2), (8, 2), (8, 2), (2, 2), (2, 2), (1, 1)]


def test_requests_get_their_places_in_the_order_of_submission(checkpoint):
    made = [request(checkpoint, key, [key + 1, 5], count) for key, count in enumerate([4, 2, 3, 1, 1, 2])]
    found = run_together(checkpoint, made, ops=make_ops(ISA), sequences=2)
    # Two places: 0 and 1 begin; 2 takes the place of 1, 3 that of 0; 2 and 3 end in one pass.
    assert found.ends == [1, 0, 2, 3, 4, 5]
    assert found.num_rows == sum(2 + count - 1 for count in [4, 2, 3, 1, 1, 2])
    # Thirteen ids, two a pass but for the last.
    assert found.num_passes == 7


@pytest.mark.parametrize("family", FAMILIES)
def test_a_stop_string_in_the_middle_ends_one_text_and_frees_its_place_for_the_next(nano_checkpoints, family):
    checkpoint = nano_checkpoints[family]
    alone = run(checkpoint, ops=make_ops("plain" if native_isas() else ISA), num_new=20)
    text = (
        run_together(checkpoint, [request(checkpoint, 0, PROMPT, 20)], ops=make_ops(ISA), sequences=1)
        .outcomes[0]
        .text
    )
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    before = text[: text.index(stop)]
    made = [
        request(checkpoint, 0, [9, 9], 20),
        request(checkpoint, 1, PROMPT, 20, stop_strings=(stop,)),
        request(checkpoint, 2, PROMPT, 20),
    ]
    found = run_together(checkpoint, made, ops=make_ops(ISA), sequences=2, chunk=64)
    stopped, whole = found.outcomes[1], found.outcomes[2]
    assert (stopped.finish, stopped.text) == ("stop_string", before)
    assert len(stopped.ids) < 20
    assert stopped.ids == alone.ids[: len(stopped.ids)]
    assert (whole.finish, whole.ids, whole.position_digests) == ("length", alone.ids, alone.digests)
    # The third request began while the first was still writing.
    assert found.ends == [1, 0, 2]
    assert found.num_passes == len(stopped.ids) + 20


def test_a_stop_id_ends_a_text(checkpoint):
    alone = run(checkpoint, ops=make_ops(ISA), num_new=8)
    stop_id = alone.ids[4]
    made = [request(checkpoint, 0, PROMPT, 8, stop_ids=frozenset({stop_id})), request(checkpoint, 1, [3], 9)]
    found = run_together(checkpoint, made, ops=make_ops(ISA), sequences=2).outcomes
    assert found[0].finish == "stop_id"
    assert found[0].ids == alone.ids[: alone.ids.index(stop_id) + 1]
    assert len(found[1].ids) == 9


def test_requests_may_come_while_others_run(checkpoint):
    model = open_shared(checkpoint, ops=make_ops(ISA), sequences=2)
    scheduler = Scheduler(model)
    try:
        assert scheduler.is_idle
        assert scheduler.num_missing == 3
        scheduler.submit(request(checkpoint, 0, PROMPT, 5))
        first = scheduler.step(lambda done: None)
        scheduler.submit(request(checkpoint, 1, PROMPT, 5))
        ids = {0: [chosen.token_id for chosen in first], 1: []}
        while not scheduler.is_idle:
            for chosen in scheduler.step(lambda done: None):
                ids[chosen.request.key].append(chosen.token_id)
    finally:
        model.close()
    assert ids[0] == ids[1] == run(checkpoint, ops=make_ops(ISA), num_new=5).ids


def test_the_pieces_of_all_passes_are_the_text(checkpoint):
    model = open_shared(checkpoint, ops=make_ops(ISA), sequences=1)
    scheduler = Scheduler(model)
    scheduler.submit(request(checkpoint, 0, PROMPT, 30, stop_strings=("never in it",)))
    pieces = []
    try:
        while not scheduler.is_idle:
            found = scheduler.step(lambda done: None)
            pieces += [chosen.piece.text for chosen in found]
    finally:
        model.close()
    assert "".join(pieces) == found[-1].outcome.text != ""


@pytest.mark.parametrize("budget", ["floor", 0.5])
def test_no_panel_is_read_that_no_pass_uses(checkpoint, budget):
    """Read-ahead runs into the next pass only where one follows."""
    made = [request(checkpoint, key, range(1 + 5 * key), 1 + key % 3) for key in range(5)]
    model = open_shared(checkpoint, ops=make_ops(ISA), sequences=2, budget=budget, chunk=4)
    scheduler = Scheduler(model)
    try:
        for one in made:
            scheduler.submit(one)
        while not scheduler.is_idle:
            scheduler.step(lambda done: None)
    finally:
        model.close()
    plan = model.plan
    again = (scheduler.num_passes - 1) * plan.streamed_bytes_per_pass
    assert model.counters.bytes_trunk == plan.trunk_bytes_per_pass + again


def test_a_sequence_beyond_its_context_is_refused(checkpoint):
    model = open_shared(checkpoint, ops=make_ops(ISA), sequences=2, context=4)
    try:
        model.run_shared([(0, [1, 2, 3]), (1, [4])], layer_done=lambda done: None)
        with pytest.raises(DoesNotFit, match="the context of 4 tokens is full"):
            model.run_shared([(1, [5]), (0, [6, 7])], layer_done=lambda done: None)
    finally:
        model.close()
