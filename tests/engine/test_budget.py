"""The plan: a sum that holds for every budget, and fewer bytes per token the more memory there is."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.plans import floor_of, plan
from twoends.checkpoint.config import read_config
from twoends.checkpoint.predicted import predicted_index
from twoends.engine.arena import PAGE
from twoends.engine.budget import MAX_CHUNK, MIN_SLOTS, make_plan, scratch_bytes
from twoends.errors import DoesNotFit
from twoends.units import format_bytes

PROPERTY = settings(max_examples=8, deadline=None)
SHARED_DATA = Path(__file__).resolve().parents[3] / "shared" / "data"


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
        assert isinstance(value, tuple | str) or value >= 0, field.name
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
