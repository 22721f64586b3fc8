"""A draft layer at work: it sees the right rows, forgets its wrong guesses, and takes what its plan says."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.backends import native_isas
from tests.support.draft_layers import write_by_heart, write_random
from tests.support.running import PROMPT, make_ops, plan_of, run
from twoends.engine.open import OpenModel
from twoends.errors import NotSound
from twoends.generate.draft_layer import LayerDrafter, layer_draft_bytes
from twoends.generate.sampler import Sampling

FAMILIES = ("kimi-k3", "kimi-linear")
# The definition gives the same bits, slowly (tests/contract/).
BEST = native_isas()[0] if native_isas() else "reference"
TEXT = [*PROMPT, 7, 301, 44, 9, 600, 2, 9, 31, 77]


def open_model(checkpoint, *, chunk=None):
    plan = plan_of(checkpoint, context=40, draft=4, chunk=chunk)
    return OpenModel(checkpoint, plan, make_ops(BEST), poison=True)


def go_through(model, ids):
    """Passes of the plan's chunk over all but the last id."""
    while model.state.position < len(ids) - 1:
        at = model.state.position
        model.run_pass(
            ids[at : min(at + model.plan.chunk_tokens, len(ids) - 1)], layer_done=lambda done: None
        )


def proposal(checkpoint, file, ids, count, *, chunk=None):
    """What a drafter says that has seen nothing but these ids."""
    model = open_model(checkpoint, chunk=chunk)
    try:
        drafter = LayerDrafter(file, model, sampling=Sampling())
        go_through(model, ids)
        return drafter.propose(ids, count)
    finally:
        model.close()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunk", [1, 3, 9, 20])
def test_a_proposal_does_not_depend_on_the_chunks_of_the_prompt(nano_checkpoints, tmp_path, family, chunk):
    checkpoint = nano_checkpoints[family]
    file = write_random(checkpoint, tmp_path / "draft")
    whole = proposal(checkpoint, file, TEXT, 4, chunk=64)
    assert proposal(checkpoint, file, TEXT, 4, chunk=chunk) == whole


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kept", [1, 2, 4])
def test_wrong_guesses_and_taken_back_rows_leave_no_trace(nano_checkpoints, tmp_path, family, kept):
    """After a pass of which some rows were kept it guesses what it would guess with those rows alone."""
    checkpoint = nano_checkpoints[family]
    file = write_random(checkpoint, tmp_path / "draft")
    model = open_model(checkpoint)
    try:
        drafter = LayerDrafter(file, model, sampling=Sampling())
        ids = list(PROMPT)
        go_through(model, ids)
        guess = drafter.propose(ids, 3)
        _, tentative = model.run_tentative([ids[-1], *guess], layer_done=lambda done: None)
        tentative.keep(kept, model.ops)
        drafter.accept(kept - 1)
        ids += [*guess[: kept - 1], 99]
        found = drafter.propose(ids, 4)
    finally:
        model.close()
    assert found == proposal(checkpoint, file, ids, 4)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pass_that_another_source_drafted_for_is_seen_as_well(nano_checkpoints, tmp_path, family):
    checkpoint = nano_checkpoints[family]
    file = write_random(checkpoint, tmp_path / "draft")
    model = open_model(checkpoint)
    try:
        drafter = LayerDrafter(file, model, sampling=Sampling())
        go_through(model, list(PROMPT))
        for step in ([PROMPT[-1], 7, 301, 500], [44, 9], [600], [2, 9, 31, 1]):
            _, tentative = model.run_tentative(step, layer_done=lambda done: None)
            tentative.keep(min(3, len(step)), model.ops)
        found = drafter.propose(TEXT, 4)
    finally:
        model.close()
    assert found == proposal(checkpoint, file, TEXT, 4)


@pytest.mark.parametrize("family", FAMILIES)
def test_it_guesses_from_the_hidden_states_of_the_right_rows(nano_checkpoints, tmp_path, family):
    """Id 17 stands twice in the text, with another id after it each time."""
    checkpoint = nano_checkpoints[family]
    file = write_by_heart(checkpoint, tmp_path / "draft", TEXT)
    model = open_model(checkpoint)
    try:
        drafter = LayerDrafter(file, model, sampling=Sampling())
        for end in range(2, len(TEXT)):
            go_through(model, TEXT[:end])
            assert drafter.propose(TEXT[:end], 1) == [TEXT[end]]
    finally:
        model.close()


def test_a_layer_whose_guesses_are_not_finite_ends_the_run(nano_checkpoints, tmp_path):
    checkpoint = nano_checkpoints["kimi-k3"]
    file = write_random(checkpoint, tmp_path / "draft")
    model = open_model(checkpoint)
    try:
        drafter = LayerDrafter(file, model, sampling=Sampling())
        drafter._weights.vector("final_norm").fill(np.float32(3e38))
        go_through(model, TEXT)
        with (
            np.errstate(all="ignore"),
            pytest.raises(NotSound, match="the draft draft gave values that aren't"),
        ):
            drafter.propose(TEXT, 2)
    finally:
        model.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_what_it_holds_is_within_what_its_row_says(nano_checkpoints, tmp_path, family):
    checkpoint = nano_checkpoints[family]
    file = write_random(checkpoint, tmp_path / "draft")
    model = open_model(checkpoint, chunk=20)
    try:
        drafter = LayerDrafter(file, model, sampling=Sampling())
        kept = [drafter._features_NTD, drafter._embedding_TD, drafter._state.cache_CM]
        held = sum(array.nbytes for array in kept) + drafter._head.num_bytes + file.num_bytes
        planned = layer_draft_bytes(file, checkpoint, context_tokens=40, chunk_tokens=20, draft_tokens=4)
    finally:
        model.close()
    # The rest is for what a few rows need while they are made.
    assert held <= planned <= held + 10**6


def test_nobody_watches_where_there_is_no_layer(nano_checkpoints):
    checkpoint = nano_checkpoints["kimi-k3"]
    found = run(checkpoint, ops=make_ops(BEST), num_new=3, draft=2)
    assert set(found.drafts) == {"lookup"}
