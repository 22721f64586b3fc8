"""The first promise, whatever is read when: guesses ahead, reads of other sizes, another run's profile."""

from __future__ import annotations

import pytest

from tests.contract.axes import FAMILIES, SHORT, assert_same
from tests.support.backends import native_isas
from tests.support.covering import every_pair, every_value
from tests.support.running import make_ops, run
from twoends.engine.reader import ReadShape

ISAS = native_isas()
BUDGETS = (0.1, 0.5)
# Pins the trunk of either family, with slots for some of the experts.
WHOLE_TRUNK = 5.0
SHAPES = {"small": ReadShape(piece_bytes=4096, depth=1), "large": ReadShape(piece_bytes=2**23, depth=8)}

pytestmark = pytest.mark.skipif(not ISAS, reason="the native kernels are not built")


@pytest.mark.matrix(
    "family, isa, how",
    (FAMILIES, ISAS, ((0.8, 1, None), (WHOLE_TRUNK, 5, 9), (1.5, 64, 16))),
    sample=every_value,
)
def test_look_ahead_changes_no_bit(nano_checkpoints, expected, tmp_path, family, isa, how):
    """Every guess is read, right or wrong, with the trunk streamed and whole, over a session break."""
    budget, chunk, save_after = how
    options = {"budget": budget, "chunk": chunk, "save_after": save_after, "tmp_path": tmp_path}
    found = run(nano_checkpoints[family], ops=make_ops(isa, 2), num_new=30, look_ahead="on", **options)
    assert_same(found, expected[family])
    assert found.plan.guess_rooms > 0
    assert found.counters.guesses_read > 20


@pytest.mark.parametrize("family", FAMILIES)
def test_look_ahead_is_not_inert(nano_checkpoints, family):
    """Guesses are read and used, some are wrong; what is read twice is what was wasted and no more."""
    options = {"ops": make_ops(ISAS[0]), "num_new": 60, "budget": WHOLE_TRUNK, "chunk": 4}
    plain = run(nano_checkpoints[family], **options)
    found = run(nano_checkpoints[family], look_ahead="on", **options)
    counters = found.counters
    assert counters.guesses_useful + counters.guesses_late > 50
    assert counters.guesses_wasted + counters.guesses_withdrawn > 0
    ends = ("useful", "late", "wasted", "withdrawn")
    assert sum(getattr(counters, f"guesses_{end}") for end in ends) == counters.guesses_read
    assert counters.choices_right > 0.5 * counters.choices_guessed
    assert plain.counters.guesses_read == 0


@pytest.mark.matrix("family, budget, shape", (FAMILIES, BUDGETS, tuple(SHAPES)), sample=every_pair)
def test_how_a_device_is_read_changes_no_bit(nano_checkpoints, expected, family, budget, shape):
    ops = make_ops(ISAS[0], 2)
    found = run(nano_checkpoints[family], ops=ops, num_new=SHORT, budget=budget, read_shape=SHAPES[shape])
    assert_same(found, expected[family])


@pytest.mark.matrix("family, budget", (FAMILIES, BUDGETS), sample=every_value)
def test_a_profile_of_another_run_changes_no_bit(nano_checkpoints, expected, family, budget):
    ops = make_ops(ISAS[0], 2)
    other = run(nano_checkpoints[family], ops=ops, num_new=SHORT, prompt=[7, 7, 8], budget=budget)
    found = run(nano_checkpoints[family], ops=ops, num_new=SHORT, budget=budget, profile=other.profile)
    assert_same(found, expected[family])


def test_neither_read_shape_nor_profile_is_inert(nano_checkpoints):
    """Smaller pieces are more reads; a profile changes which experts stay."""
    checkpoint = nano_checkpoints["kimi-k3"]
    plain = run(checkpoint, ops=make_ops(ISAS[0]), num_new=20, budget=0.5)
    small = run(
        checkpoint,
        ops=make_ops(ISAS[0]),
        num_new=20,
        budget=0.5,
        read_shape=SHAPES["small"],
    )
    assert small.counters.num_reads > plain.counters.num_reads
    warm = run(checkpoint, ops=make_ops(ISAS[0]), num_new=20, budget=0.5, profile=plain.profile)
    assert warm.counters.expert_hits != plain.counters.expert_hits
