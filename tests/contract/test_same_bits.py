"""The first promise: the same bits at every budget, thread count, CPU, chunk, policy, break, pack or none.

The reference case runs in ample memory on one thread in plain C++ with the whole prompt as one
chunk; every other case must give its ids and the digest of its binary32 logits at every position.
Released buffers are overwritten with NaN patterns throughout.

The matrix is sampled so that any two choices meet in some case; --matrix=full, as CI runs it, asks for all.
"""

from __future__ import annotations

import itertools

import pytest

from tests.contract.axes import BUDGETS, CHUNKS, FAMILIES, LONG, PACKS, POLICIES, SHORT, assert_same
from tests.support.backends import native_isas
from tests.support.covering import every_pair, every_value, pairs_of
from tests.support.running import PROMPT, make_ops, run
from twoends.generate.sampler import Sampling

ISAS = native_isas()
AXES = (FAMILIES, ISAS, (1, 2), tuple(PACKS), BUDGETS, CHUNKS, POLICIES, (None, 3))

pytestmark = pytest.mark.skipif(not ISAS, reason="the native kernels are not built")


@pytest.mark.matrix("family, isa, threads, pack, budget, chunk, policy, save_after", AXES, sample=every_pair)
def test_every_combination_gives_the_same_logits(
    trunks, expected, tmp_path, family, isa, threads, pack, budget, chunk, policy, save_after
):
    found = run(
        trunks[family, pack],
        ops=make_ops(isa, threads),
        num_new=SHORT,
        budget=budget,
        chunk=chunk,
        policy=policy,
        save_after=save_after,
        tmp_path=tmp_path,
    )
    assert_same(found, expected[family])


def test_the_sample_of_the_matrix_has_every_pair_of_choices():
    cases = every_pair(AXES)
    met = set(itertools.chain.from_iterable(pairs_of([[value] for value in case]) for case in cases))
    assert met == set(pairs_of(AXES))
    assert len(cases) < 30


LONG_RUNS = (("floor", 3, "decayed", None), (0.1, 64, "lru", 77), ("ample", 1, "decayed", 150))


@pytest.mark.matrix("family, isa, how", (FAMILIES, ISAS, LONG_RUNS), sample=every_value)
def test_long_runs_stay_the_same(nano_checkpoints, expected, tmp_path, family, isa, how):
    budget, chunk, policy, save_after = how
    found = run(
        nano_checkpoints[family],
        ops=make_ops(isa, 2),
        num_new=LONG,
        budget=budget,
        chunk=chunk,
        policy=policy,
        save_after=save_after,
        tmp_path=tmp_path,
    )
    assert_same(found, expected[family])


@pytest.mark.matrix("family, pack", (FAMILIES, ("none", "experts")), sample=every_value)
def test_the_numpy_definition_gives_the_same_logits(trunks, expected, family, pack):
    found = run(trunks[family, pack], ops=make_ops("reference"), num_new=4, budget="floor", chunk=5)
    assert_same(found, expected[family])


@pytest.mark.parametrize("family", FAMILIES)
def test_sampled_text_is_the_same_at_every_budget_and_break(nano_checkpoints, tmp_path, family):
    sampling = Sampling(temperature=0.9, top_p=0.95, seed=7)
    checkpoint = nano_checkpoints[family]
    plain = run(checkpoint, ops=make_ops("plain"), num_new=24, sampling=sampling)
    other = run(
        checkpoint,
        ops=make_ops(ISAS[0], 2),
        num_new=24,
        sampling=sampling,
        budget="floor",
        chunk=2,
        save_after=13,
        tmp_path=tmp_path,
    )
    assert_same(other, plain)
    reseeded = run(
        checkpoint, ops=make_ops("plain"), num_new=9, sampling=Sampling(temperature=0.9, top_p=0.95, seed=8)
    )
    assert reseeded.ids != plain.ids[:9]


def test_a_pack_is_not_inert(trunks):
    """Each has fewer bytes to read than the one before, or other files to read them from."""
    found = {
        pack: run(
            trunks["kimi-k3", pack], ops=make_ops("plain"), num_new=SHORT, budget="floor", chunk=3
        ).counters
        for pack in PACKS
    }
    assert found["entropy"].bytes_trunk < found["fixed"].bytes_trunk < found["none"].bytes_trunk
    assert found["experts"].bytes_experts < found["entropy"].bytes_experts == found["none"].bytes_experts
    for pack in ("fixed", "entropy"):
        blocks = trunks["kimi-k3", pack].index.pack.blocks
        assert 0 < blocks["packed"].sum() < len(blocks)
    stripes = trunks["kimi-k3", "striped"].index.pack.blocks["stripe"]
    assert min((stripes == i).sum() for i in range(3)) > len(stripes) // 4


def test_the_axes_are_not_inert(nano_checkpoints, expected):
    """Each choice changes what the engine does, or the matrix above would prove nothing."""
    checkpoint = nano_checkpoints["kimi-k3"]
    runs = {
        budget: run(checkpoint, ops=make_ops("plain"), num_new=SHORT, budget=budget, chunk=3)
        for budget in BUDGETS
    }
    reads = [runs[budget].counters.bytes_read for budget in BUDGETS]
    assert reads[0] > reads[1] > reads[2]
    assert runs["floor"].counters.expert_hits < runs["ample"].counters.expert_hits
    lru = run(checkpoint, ops=make_ops("plain"), num_new=SHORT, budget=0.5, chunk=3, policy="lru")
    decayed = run(checkpoint, ops=make_ops("plain"), num_new=SHORT, budget=0.5, chunk=3)
    assert lru.counters.expert_hits != decayed.counters.expert_hits
    whole = run(checkpoint, ops=make_ops("plain"), num_new=SHORT, budget="floor", chunk=len(PROMPT))
    assert whole.counters.bytes_trunk < runs["floor"].counters.bytes_trunk
    assert len(set(expected["kimi-k3"].ids)) > 20, "a model that repeats itself would hide a difference"
