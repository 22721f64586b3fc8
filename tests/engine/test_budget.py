"""The plan: a sum that holds for every budget, and bytes per token that a run then counts."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.backends import native_isas
from tests.support.opened import generate, opened
from tests.support.running import PROMPT, make_ops
from tests.support.together import open_shared, request
from twoends.checkpoint.config import read_config
from twoends.checkpoint.predicted import predicted_index
from twoends.checkpoint.presets import preset_config
from twoends.checkpoint.tiny import write_synthetic
from twoends.engine.arena import PAGE
from twoends.engine.budget import MAX_CHUNK, MIN_SLOTS, make_plan, scratch_bytes
from twoends.engine.open import Checkpoint
from twoends.engine.sequences import MAX_SEQUENCES, Load, best_plan, expected_bytes, weighed_bytes
from twoends.errors import DoesNotFit
from twoends.generate.generator import Generator
from twoends.generate.schedule import Scheduler
from twoends.model.state import cache_bytes_per_token, recurrent_bytes
from twoends.units import format_bytes

SHARED_DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
FAMILIES = ("kimi-k3", "kimi-linear")
ISA = (native_isas() or ["reference"])[0]
PROPERTY = settings(max_examples=8, deadline=None)


@pytest.fixture(scope="module")
def models(nano_checkpoints):
    """name -> (config, index): nano models, and synthetic shapes of which only the config exists."""
    found = {family: (c.config, c.index) for family, c in nano_checkpoints.items()}
    for preset in ("mini", "layer"):
        config = preset_config(preset)
        found[preset] = (config, predicted_index(Path("nowhere"), config))
    return found


def plan(model, ram_bytes, *, program=40_000_000, context=100, chunk=None, sequences=1):
    config, index = model
    return make_plan(
        config,
        index,
        ram_bytes=ram_bytes,
        program_bytes=program,
        context_tokens=context,
        chunk_tokens=chunk,
        num_sequences=sequences,
    )


def floor_of(model, **options):
    return plan(model, 10**13, **options).floor_bytes


@pytest.mark.parametrize("name", ["kimi-k3", "kimi-linear", "mini"])
@given(
    above=st.one_of(st.integers(0, 60_000_000), st.floats(0, 30).map(lambda x: int(math.exp2(x)))),
    program=st.integers(0, 10**9),
    context=st.integers(1, 10**5),
    chunk=st.one_of(st.none(), st.integers(1, 300)),
)
@PROPERTY
def test_the_rows_are_a_sum_within_the_budget_and_nothing_is_negative(
    models, name, above, program, context, chunk
):
    options = {"program": program, "context": context, "chunk": chunk}
    ram_bytes = floor_of(models[name], **options) + above
    found = plan(models[name], ram_bytes, **options)
    assert found.total_bytes == sum(row.num_bytes for row in found.rows) <= ram_bytes == found.ram_bytes
    for field in dataclasses.fields(found):
        value = getattr(found, field.name)
        assert isinstance(value, tuple) or value >= 0, field.name
    assert all(row.num_bytes > 0 for row in found.rows)
    assert found.pinned_bytes <= found.pin_budget_bytes <= found.trunk_bytes_per_pass
    assert found.streamed_bytes_per_pass >= 0
    # What is left over is less than the smallest thing that it could still buy: a slot or the next panel.
    assert found.num_slots >= MIN_SLOTS
    assert found.window_bytes >= 4 * min(found.panel_bytes, found.window_bytes // 4) or not found.window_bytes
    longest = min(MAX_CHUNK if chunk is None else chunk, context)
    assert found.chunk_tokens == longest or (chunk is None and 1 <= found.chunk_tokens < longest)


@pytest.mark.parametrize("name", ["kimi-k3", "kimi-linear", "mini", "layer"])
@pytest.mark.parametrize("chunk", [None, 1, 7])
def test_the_floor_runs_and_a_byte_less_is_refused_with_the_sum(models, name, chunk):
    floor = floor_of(models[name], chunk=chunk)
    assert plan(models[name], floor, chunk=chunk).total_bytes == floor
    with pytest.raises(DoesNotFit) as caught:
        plan(models[name], floor - 1, chunk=chunk)
    error = caught.value
    assert format_bytes(floor) in error.headline
    rows = [row for row in plan(models[name], floor, chunk=chunk).floor_rows if row.num_bytes]
    assert [row[:2] for row in error.evidence] == [(r.name, format_bytes(r.num_bytes)) for r in rows]
    advised = re.search(r"--ram (\d+)(MB|GB)", str(error))
    assert int(advised[1]) * {"MB": 10**6, "GB": 10**9}[advised[2]] >= floor


@pytest.mark.parametrize("name", ["kimi-k3", "kimi-linear", "mini", "layer"])
def test_twice_the_room_never_streams_more(models, name):
    """Above the floor, doubling what a budget leaves never costs bytes of a token.

    Up to a thousandth: panels of another size have another share of alignment.
    """
    floor = floor_of(models[name])
    steps = [plan(models[name], floor + 2**k) for k in range(10, 36)]
    per_token = [p.bytes_per_token for p in steps]
    assert all(b <= a * 1.001 for a, b in itertools.pairwise(per_token))
    assert per_token[-1] < per_token[0] / 2
    enough = MIN_SLOTS + models[name][0].experts_per_token
    reached = [p.num_slots >= enough for p in steps]
    assert reached == sorted(reached), "room for one layer's choice, once there, stays"


@pytest.mark.parametrize("name", ["kimi-k3", "mini"])
@given(above=st.floats(10, 31), more=st.integers(1, 10**7))
@PROPERTY
def test_any_more_memory_streams_at_most_one_step_more(models, name, above, more):
    """A step is a slot, a panel, or the rows of a wider chunk: what was pinned gives way to it at once.

    Each is bought for what it saves elsewhere (expert reads, waiting, prefill), so a small dip is right.
    """
    floor = floor_of(models[name])
    config, _ = models[name]
    small = plan(models[name], floor + int(math.exp2(above)))
    large = plan(models[name], small.ram_bytes + more)
    slots = (large.num_slots - small.num_slots) * large.slot_bytes
    rows = scratch_bytes(config, large.chunk_tokens) - scratch_bytes(config, small.chunk_tokens)
    window = large.window_bytes - small.window_bytes
    panel = min(max(small.panel_bytes, large.panel_bytes), 8 * 2**20)
    step = max(slots, 0) + max(rows, 0) + max(window, 0) + panel
    # Panels of other sizes have other shares of alignment: at most two pages a panel.
    aligned = abs(large.trunk_bytes_per_pass - small.trunk_bytes_per_pass)
    assert large.streamed_bytes_per_pass <= small.streamed_bytes_per_pass + step + aligned


@pytest.mark.parametrize("name", ["kimi-k3", "kimi-linear", "mini", "layer"])
def test_ample_memory_holds_everything_and_takes_no_more(models, name):
    config, index = models[name]
    found = plan(models[name], 10**13)
    assert found.streamed_bytes_per_pass == 0
    assert found.window_bytes == 0
    assert found.num_slots == len(config.moe_layers) * config.num_experts
    # The weights, less the embedding that is read by row; alignment and books are under a tenth for nano.
    weights = index.trunk_bytes + index.experts_bytes
    held = sum(r.num_bytes for r in found.rows if "slots" in r.name or "pinned" in r.name)
    pages = found.num_slots * 2 * PAGE + 2 * PAGE * 60 * config.num_layers
    assert weights <= held <= weights + pages + found.num_slots * 2048


@pytest.mark.parametrize("context", [1, 100, 4096, 10**6])
def test_context_is_in_the_plan_byte_for_byte(models, context):
    config, _ = models["mini"]
    more = floor_of(models["mini"], context=context) - floor_of(models["mini"], context=1)
    exact = (context - 1) * 4 * config.latent_row * len(config.mla_layers)
    assert abs(more - exact) < 2 * PAGE


def test_kimi_k3_runs_in_less_than_a_gigabyte():
    """The floor of the full model at 4,096 tokens of context, with the program at 60 MB."""
    if not SHARED_DATA.is_dir():
        pytest.skip("the released configs are not beside this repository")
    directory = SHARED_DATA / "kimi-k3"
    config = read_config(directory)
    index = predicted_index(directory, config)
    floor = make_plan(
        config, index, ram_bytes=10**15, program_bytes=60_000_000, context_tokens=4096, chunk_tokens=1
    ).floor_bytes
    assert floor < 1_000_000_000
    tight = make_plan(
        config, index, ram_bytes=floor, program_bytes=60_000_000, context_tokens=4096, chunk_tokens=None
    )
    assert tight.total_bytes == floor
    # The trunk alone is more than a hundred times the budget.
    assert tight.streamed_bytes_per_pass > 100 * floor


@pytest.fixture(scope="module")
def small_checkpoint(tmp_path_factory):
    """Experts of 25 pages and matrices of 500: alignment is under a hundredth of every read."""
    nano = preset_config("nano")
    config = dataclasses.replace(
        nano,
        num_layers=5,
        hidden_size=512,
        vocab_size=1024,
        dense_width=1024,
        num_experts=16,
        expert_width=256,
        latent_width=256,
        mla_layers=(3, 4),
        bos_id=768,
        eos_id=770,
        pad_id=1023,
    )
    directory = tmp_path_factory.mktemp("small") / "model"
    write_synthetic(directory, config, seed=2)
    return Checkpoint.open(directory)


@pytest.mark.parametrize("budget", ["floor", 0.3, 1.0])
def test_a_run_counts_the_bytes_that_its_plan_promised(small_checkpoint, budget):
    """Decode passes at budgets that hold no expert for long: within 1 %, the trunk to the byte."""
    with opened(small_checkpoint, budget=budget, chunk=12, policy="lru") as model:
        generator = Generator(model, list(PROMPT), chunk=12)
        generate(generator, 1)
        counters = dataclasses.replace(model.counters)
        generate(generator, 6)
        found = model.counters
        planned = model.plan
    trunk = found.bytes_trunk - counters.bytes_trunk
    assert trunk == 6 * planned.streamed_bytes_per_pass > 0
    misses = (found.expert_requests - found.expert_hits) - (counters.expert_requests - counters.expert_hits)
    experts = found.bytes_experts - counters.bytes_experts
    assert experts == pytest.approx(misses * planned.expert_bytes_per_request, rel=0.01)
    assert found.expert_requests - counters.expert_requests == 6 * planned.experts_per_pass
    embedding = found.bytes_embedding - counters.bytes_embedding
    # The plan counts a row that crosses a page border; most don't.
    assert 0 < embedding <= 6 * planned.embedding_bytes_per_token
    if misses == 6 * planned.experts_per_pass:
        total = trunk + experts + embedding
        assert total == pytest.approx(6 * planned.bytes_per_token, rel=0.01)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("budget", ["floor", 0.2, 0.5, "ample"])
def test_what_the_engine_holds_is_what_the_plan_says(nano_checkpoints, family, budget):
    with opened(nano_checkpoints[family], budget=budget) as model:
        planned = {row.name: row.num_bytes for row in model.plan.rows}
        held = model.held_bytes
    books = model.plan.num_slots * 2048
    rows = sum(
        size for name, size in planned.items() if name not in ("program", "activations", "embedding rows")
    )
    assert sum(planned.values()) == model.plan.total_bytes, "no two rows have one name"
    assert held <= rows
    # Rows are rounded up to pages; pinned ones include small tensors in binary32, slots their books.
    assert rows - held <= books + len(planned) * PAGE + _decoded_bytes(model)


def _decoded_bytes(model):
    index = model.checkpoint.index
    layers = [None, *range(model.config.num_layers)]
    refs = [ref for layer in layers for ref in index.tensors(layer).values()]
    return sum(4 * math.prod(ref.shape) for ref in refs if min(ref.shape) < 8 or len(ref.shape) == 1)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunk", [1, 16, 256])
def test_the_activations_of_a_pass_stay_within_their_row(nano_checkpoints, family, chunk):
    """numpy tells tracemalloc of every array; Python's own small objects get 64 KB."""
    checkpoint = nano_checkpoints[family]
    with opened(checkpoint, context=2 * chunk, chunk=chunk) as model:
        model.run_pass([1] * chunk, layer_done=lambda done: None)
        tracemalloc.start()
        try:
            model.run_pass([i % 700 for i in range(chunk)], layer_done=lambda done: None)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert peak <= scratch_bytes(checkpoint.config, chunk) + 64 * 1024


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


@pytest.mark.parametrize("name", ["kimi-k3", "mini"])
@pytest.mark.parametrize("above", [10**6, 6 * 10**7, 10**10])
@pytest.mark.parametrize("most", [3, 100])
@pytest.mark.parametrize("prompt", [1, 960])
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


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("sequences", "chunk"), [(2, 2), (8, 8), (8, 64), (3, 200)])
def test_the_activations_of_a_shared_pass_stay_within_their_rows(nano_checkpoints, family, sequences, chunk):
    """One sequence has most rows, then all have one; states, logits and sampling are counted elsewhere."""
    checkpoint = nano_checkpoints[family]
    model = open_shared(
        checkpoint, ops=make_ops(ISA), sequences=sequences, context=2 * chunk + 2, chunk=chunk
    )
    ones = [(place, [place + 1]) for place in range(1, sequences)]
    try:
        model.run_shared([(0, [1] * (chunk - sequences + 1)), *ones], layer_done=lambda done: None)
        tracemalloc.start()
        try:
            again = [i % 700 for i in range(chunk - sequences + 1)]
            model.run_shared([(0, again), *ones], layer_done=lambda done: None)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    finally:
        model.close()
    logits = next(row.num_bytes for row in model.plan.rows if row.name == "logits")
    assert peak <= scratch_bytes(checkpoint.config, chunk) + logits + 64 * 1024
