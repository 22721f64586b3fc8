"""The split of memory by a curve of hits, the curve itself, and where it comes from."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.opened import generate, opened
from tests.support.running import PROMPT
from twoends.bench.replay import measured_profile, replay
from twoends.bench.traces import read_trace
from twoends.checkpoint.predicted import predicted_index
from twoends.checkpoint.presets import preset_config
from twoends.engine.budget import make_plan
from twoends.engine.curve import HitCurve, assumed_curve, with_ends
from twoends.engine.profile import read_profile, write_profile
from twoends.engine.split import MIN_SLOTS
from twoends.errors import OptionError
from twoends.generate.generator import Generator

CONFIG = preset_config("mini")
INDEX = predicted_index(Path("nowhere"), CONFIG)
REQUESTS = len(CONFIG.moe_layers) * CONFIG.experts_per_token
ALL_SLOTS = len(CONFIG.moe_layers) * CONFIG.num_experts


def plan(ram_bytes, *, curve=None):
    return make_plan(
        CONFIG,
        INDEX,
        ram_bytes=ram_bytes,
        program_bytes=40_000_000,
        context_tokens=100,
        chunk_tokens=8,
        curve=curve,
    )


def curve_of(*points):
    return HitCurve(points=tuple(points), source="made up")


# No slot can truly save more than its own read; a steep curve says so all the same.
STEEP = curve_of((80, 80 * 2.0 / REQUESTS), (ALL_SLOTS, 1.0))
FLAT = curve_of((ALL_SLOTS - 1, 0.01), (ALL_SLOTS, 1.0))
# Nothing until a whole cycle is here, then most at once.
CLIFF = curve_of((REQUESTS - 1, 0.0), (REQUESTS, 1.0), (ALL_SLOTS, 1.0))


def test_a_steep_curve_gives_slots_and_a_flat_one_pins():
    steep, flat = plan(400_000_000, curve=STEEP), plan(400_000_000, curve=FLAT)
    assert steep.num_slots >= 80
    assert flat.num_slots < 40
    assert flat.pinned_bytes > steep.pinned_bytes + 30 * steep.slot_bytes
    assert (steep.expected_hits, steep.hits_source) == (STEEP.share(steep.num_slots), "made up")


def test_slots_beyond_the_bend_of_a_curve_are_not_bought_before_the_trunk():
    assert 80 <= plan(450_000_000, curve=STEEP).num_slots < 110


def test_a_cliff_is_climbed_only_as_a_whole():
    """All the slots of one cycle save as much as their bytes or a little less: the trunk comes first."""
    assert plan(400_000_000, curve=CLIFF).num_slots < 40


def test_a_real_curve_never_pays_more_than_a_pinned_byte():
    """A slot serves one request a token at most, and its room is a little more than what it saves."""
    share = 1.0 / REQUESTS
    for slots in (50, 184, 500):
        best_there_is = curve_of((slots, min(1.0, slots * share)), (ALL_SLOTS, 1.0))
        assert plan(400_000_000, curve=best_there_is).num_slots < 40


@pytest.mark.parametrize("curve", [None, STEEP, FLAT, CLIFF], ids=["assumed", "steep", "flat", "cliff"])
def test_more_memory_never_expects_more_bytes(curve):
    floor = plan(10**12, curve=curve).floor_bytes
    budgets = [floor + 7_000_001 * k for k in (0, 3, 12, 30, 56, 57, 90, 200)]
    plans = [plan(ram, curve=curve) for ram in budgets]
    for less, more in itertools.pairwise(plans):
        # One panel or one slot may fall on either side of a border.
        slack = less.panel_bytes if less.window_bytes else 0
        assert more.expected_bytes_per_token <= less.expected_bytes_per_token + slack + less.slot_bytes
        assert more.num_slots >= MIN_SLOTS
    assert plans[0].num_slots == MIN_SLOTS


@given(
    above=st.integers(0, 1_500_000_000),
    shares=st.lists(st.floats(0, 1), min_size=1, max_size=6),
    slots=st.lists(st.integers(1, ALL_SLOTS - 1), min_size=6, max_size=6, unique=True),
)
@settings(max_examples=5, deadline=None)
def test_whatever_the_curve_the_plan_is_within_budget_and_above_the_least(above, shares, slots):
    points = list(zip(sorted(slots), sorted(shares), strict=False))
    curve = HitCurve(points=with_ends(points, ALL_SLOTS), source="any")
    ram = plan(10**12).floor_bytes + above
    found = plan(ram, curve=curve)
    assert found.total_bytes <= ram
    assert MIN_SLOTS <= found.num_slots <= ALL_SLOTS
    assert 0 <= found.expected_hits <= 1
    assert found.window_bytes or found.pinned_bytes == found.trunk_bytes_per_pass


def test_a_curve_is_read_between_its_points():
    curve = curve_of((10, 0.2), (20, 0.4), (40, 1.0))
    assert [curve.share(slots) for slots in (0, 5, 10, 15, 40, 99)] == pytest.approx([0, 0.1, 0.2, 0.3, 1, 1])


def test_the_assumed_curve_rises_to_every_expert():
    curve = assumed_curve(cycle_slots=REQUESTS, all_slots=ALL_SLOTS)
    shares = [curve.share(slots) for slots in range(0, ALL_SLOTS + 1, 16)]
    assert shares == sorted(shares)
    assert (curve.share(0), curve.share(ALL_SLOTS)) == (0, 1)
    assert curve.source.startswith("assumed")


@pytest.fixture(scope="module")
def measured(nano_checkpoints, tmp_path_factory):
    """(checkpoint, path of a profile that a replay of its own trace wrote)."""
    checkpoint = nano_checkpoints["kimi-k3"]
    directory = tmp_path_factory.mktemp("curve")
    with opened(checkpoint, budget=0.3, chunk=4, trace=directory / "t.jsonl") as model:
        generate(Generator(model, list(PROMPT), chunk=4), 30)
    trace = read_trace(directory / "t.jsonl")
    config = checkpoint.config
    profile = measured_profile(
        trace,
        replay(trace, capacities=(0.5, 1, 2)),
        fingerprint=checkpoint.index.fingerprint,
        layers=range(config.num_dense_layers, config.num_layers),
        num_experts=config.num_experts,
    )
    write_profile(directory / "p", profile)
    return checkpoint, directory / "p"


def read(path, checkpoint, **other):
    config = checkpoint.config
    known = {
        "fingerprint": checkpoint.index.fingerprint,
        "num_layers": len(config.moe_layers),
        "num_experts": config.num_experts,
    }
    return read_profile(path, **(known | other))


def test_a_replay_of_a_models_own_trace_gives_its_plan_a_measured_curve(measured):
    checkpoint, path = measured
    profile = read(path, checkpoint)
    assert profile.curve.source.startswith("measured: replay of")
    assert profile.popularity_LE.max() > 0
    found = make_plan(
        checkpoint.config,
        checkpoint.index,
        ram_bytes=10**12,
        program_bytes=0,
        context_tokens=50,
        chunk_tokens=4,
        curve=profile.curve,
    )
    assert (found.hits_source, found.expected_hits) == (profile.curve.source, 1.0)


def test_a_profile_with_a_curve_of_another_model_is_refused(measured):
    checkpoint, path = measured
    with pytest.raises(OptionError, match="was not made by this model"):
        read(path, checkpoint, fingerprint="another")


@pytest.mark.parametrize(
    "found",
    [
        {},
        {"points": [[1, 0.5]]},
        {"points": [[2, 0.5], [1, 0.6]], "source": "x"},
        {"points": [[1, 0.5], [2, 0.4]], "source": "x"},
        {"points": [[1, 1.5]], "source": "x"},
        {"points": [[1, "half"]], "source": "x"},
        {"points": 5, "source": "x"},
    ],
)
def test_what_is_no_curve_is_refused(found):
    with pytest.raises((TypeError, ValueError, KeyError)):
        HitCurve.from_object(found)
