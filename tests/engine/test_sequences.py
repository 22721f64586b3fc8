"""Sequences that share a budget: in the plan byte for byte, as many as read the fewest bytes a row."""

from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.plans import floor_of, plan
from tests.support.covering import every_pair
from tests.support.together import request
from twoends.checkpoint.predicted import predicted_index
from twoends.checkpoint.presets import preset_config
from twoends.engine.arena import PAGE
from twoends.engine.budget import MIN_SLOTS
from twoends.engine.sequences import MAX_SEQUENCES, Load, best_plan, expected_bytes, weighed_bytes
from twoends.errors import DoesNotFit
from twoends.generate.schedule import Scheduler
from twoends.model.state import cache_bytes_per_token, recurrent_bytes

PROPERTY = settings(max_examples=8, deadline=None)


@pytest.mark.parametrize("name", ["kimi-k3", "kimi-linear", "mini"])
@given(
    above=st.floats(0, 30).map(lambda x: int(math.exp2(x))),
    sequences=st.integers(1, 70),
    context=st.integers(1, 3000),
    chunk=st.one_of(st.none(), st.integers(1, 300)),
)
@PROPERTY
def test_many_sequences_are_in_the_plan_byte_for_byte(models, name, above, sequences, context, chunk):
    config, _ = models[name]
    options = {"context": context, "chunk": chunk, "sequences": sequences}
    found = plan(models[name], floor_of(models[name], **options) + above, **options)
    rows = {row.name: row.num_bytes for row in found.rows}
    assert found.total_bytes <= found.ram_bytes
    assert 0 <= rows["recurrent state"] - sequences * recurrent_bytes(config) < PAGE
    assert 0 <= rows["latent cache"] - sequences * context * cache_bytes_per_token(config) < PAGE
    # Every sequence has a row in every pass, and no row that nobody could fill is planned.
    assert sequences <= found.chunk_tokens <= max(sequences, sequences * context)
    assert found.num_slots >= MIN_SLOTS


@pytest.mark.parametrize("name", ["kimi-k3", "mini"])
def test_one_sequence_is_planned_as_if_there_were_no_others(models, name):
    found = plan(models[name], floor_of(models[name]) + 10**7)
    assert found.bytes_per_token == (
        found.streamed_bytes_per_pass + found.expert_bytes_per_token + found.embedding_bytes_per_token
    )
    assert "logits" not in {row.name for row in found.rows}


def test_eight_sequences_of_kimi_k3_read_as_many_bytes_as_the_design_says():
    """108.81 GB of trunk and 25.83 GB of experts a token: 3.55 times less for each of eight (design 5)."""
    config = preset_config("layer")
    whole = plan((config, predicted_index(Path("nowhere"), config)), 10**9)
    shown = dataclasses.replace(
        whole,
        pinned_bytes=0,
        trunk_bytes_per_pass=108_810_000_000,
        expert_bytes_per_request=25_830_000_000 / 1472,
        experts_per_pass=1472,
        experts_in_all=82_432,
        embedding_bytes_per_token=0,
    )
    eight = dataclasses.replace(shown, num_sequences=8)
    assert shown.bytes_per_token / eight.bytes_per_token == pytest.approx(3.55, abs=0.01)


@pytest.mark.matrix(
    "name, above, most, prompt",
    (("kimi-k3", "mini"), (10**6, 6 * 10**7, 10**10), (3, 100), (1, 960)),
    sample=every_pair,
)
def test_the_number_of_sequences_is_the_one_with_the_fewest_bytes_a_row(models, name, above, most, prompt):
    ram_bytes = floor_of(models[name]) + above

    def plan_for(count, chunk):
        return plan(models[name], ram_bytes, sequences=count, chunk=chunk)

    load = Load(prompt_tokens=prompt, new_tokens=32)
    best = best_plan(plan_for, most=most, load=load)
    assert 1 <= best.num_sequences <= min(most, MAX_SEQUENCES)
    for count, chunk in itertools.product((1, 2, 3), (1, 16, 64)):
        try:
            other = plan_for(count, max(chunk, count))
        except DoesNotFit:
            continue
        assert weighed_bytes(best, load) <= weighed_bytes(other, load)
    if above == 10**10 and prompt < 32:
        assert best.num_sequences == min(most, MAX_SEQUENCES), "where all is in memory, nobody waits"


def test_long_prompts_get_wide_passes_and_short_ones_get_sequences(models):
    ram_bytes = floor_of(models["mini"]) + 60_000_000

    def plan_for(count, chunk):
        return plan(models["mini"], ram_bytes, sequences=count, chunk=chunk)

    many = Load(prompt_tokens=3000, new_tokens=30)
    short = best_plan(plan_for, most=100, load=Load(prompt_tokens=3, new_tokens=30))
    long = best_plan(plan_for, most=100, load=many)
    assert long.chunk_tokens > 2 * short.chunk_tokens
    assert long.num_sequences < short.num_sequences
    assert expected_bytes(long, many) < expected_bytes(short, many) / 2


@pytest.mark.parametrize("sequences", [1, 3, 8])
@pytest.mark.parametrize("chunk", [8, 16, 64])
@pytest.mark.parametrize(("prompt", "new"), [(1, 20), (12, 20), (90, 6), (40, 1)])
def test_the_rows_that_are_expected_come(nano_checkpoints, sequences, chunk, prompt, new):
    """Sixty equal requests: within a fifth, which is what the beginning and the end of them do."""
    checkpoint = nano_checkpoints["kimi-k3"]
    made = [request(checkpoint, key, [1 + key % 9] * prompt, new) for key in range(60)]
    scheduler = Scheduler(Passes(sequences, chunk))
    for one in made:
        scheduler.submit(one)
    while not scheduler.is_idle:
        scheduler.step(lambda done: None)
    load = Load(prompt_tokens=prompt, new_tokens=new)
    found = scheduler.num_rows / scheduler.num_passes
    expected = load.rows_of(SimpleNamespace(chunk_tokens=chunk, num_sequences=sequences))
    assert found <= expected * 1.01
    assert found >= expected * 0.8


class Passes:
    """Stands in for a model: counts rows and gives logits of nothing."""

    def __init__(self, sequences, chunk):
        self.plan = SimpleNamespace(num_sequences=sequences, chunk_tokens=chunk, context_tokens=10**6)
        self.states = [SimpleNamespace(reset=lambda: None)] * sequences

    def expect_passes(self, count):
        pass

    def run_shared(self, parts, *, layer_done):
        return np.zeros((len(parts), 8), np.float32)


def test_a_number_of_sequences_that_is_asked_for_is_taken(models):
    ram_bytes = floor_of(models["mini"]) + 60_000_000

    def plan_for(count, chunk):
        return plan(models["mini"], ram_bytes, sequences=count, chunk=chunk)

    load = Load(prompt_tokens=9, new_tokens=9)
    assert best_plan(plan_for, most=100, load=load, exactly=3).num_sequences == 3
    with pytest.raises(DoesNotFit):
        best_plan(plan_for, most=1, load=load, exactly=40)


def test_not_one_sequence_is_refused(models):
    floor = floor_of(models["mini"])
    with pytest.raises(DoesNotFit, match="needs at least"):
        best_plan(
            lambda count, chunk: plan(models["mini"], floor - 1, sequences=count, chunk=chunk),
            most=4,
            load=Load(prompt_tokens=1, new_tokens=1),
        )


def test_eight_sequences_of_mini_fit_into_a_tenth_of_it(models):
    """The state of one is 10 MB: the window gives way before a sequence does."""
    index = models["mini"][1]
    ram_bytes = (index.trunk_bytes + index.experts_bytes) // 10
    found = best_plan(
        lambda count, chunk: plan(
            models["mini"], ram_bytes, program=60_000_000, sequences=count, chunk=chunk
        ),
        most=8,
        load=Load(prompt_tokens=4, new_tokens=32),
    )
    alone = plan(models["mini"], ram_bytes, program=60_000_000)
    assert found.num_sequences == 8
    assert found.bytes_per_token < 0.35 * alone.bytes_per_token
