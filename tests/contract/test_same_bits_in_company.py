"""The first promise, in company: whoever shares the passes, each gets the bits that it gets alone."""

from __future__ import annotations

import pytest

from tests.contract.axes import BUDGETS, FAMILIES, LONG, POLICIES, SHORT
from tests.support.backends import native_isas
from tests.support.covering import every_pair, every_value
from tests.support.running import PROMPT, make_ops, run
from tests.support.together import request, run_together
from twoends.generate.sampler import Sampling

ISAS = native_isas()

pytestmark = pytest.mark.skipif(not ISAS, reason="the native kernels are not built")

# Who shares the passes with PROMPT: (prompt, new tokens, temperature) of each, those before it and after it.
MATES = {
    "alone": ([], []),
    "others": ([([7, 7, 8], 3, 0.0), (range(100, 121), 9, 0.8)], [([1], 12, 0.0), (range(400, 405), 2, 1.0)]),
    "twins": ([(PROMPT, SHORT, 0.0), (PROMPT, 2, 0.0)], [(PROMPT, SHORT, 0.7)]),
}
# For numpy, which is slow.
FEW = {"few": ([([7, 7, 8], 2, 0.0)], [([1], 3, 0.0)])}


def beside(checkpoint, mates, *, sequences, num_new=SHORT, **options):
    """PROMPT (key 0) with its mates, each of whom has a key of its own."""
    before, after = (MATES | FEW)[mates]
    made = [
        request(checkpoint, key, prompt, count, sampling=Sampling(temperature=temperature, seed=key))
        for key, (prompt, count, temperature) in enumerate([*before, *after], 1)
    ]
    made.insert(len(before), request(checkpoint, 0, PROMPT, num_new))
    return run_together(checkpoint, made, sequences=sequences, **options)


@pytest.mark.matrix(
    "family, isa, mates, budget, chunk, sequences, policy, pack",
    (FAMILIES, ISAS, tuple(MATES), BUDGETS, (1, 3, 64), (2, 8), POLICIES, ("none", "fixed")),
    sample=every_pair,
)
def test_batch_mates_change_no_bit(
    trunks, expected, family, isa, mates, budget, chunk, sequences, policy, pack
):
    """In company, in a place that another has left, in chunks of any size, at every budget and pack."""
    options = {"budget": budget, "chunk": chunk, "policy": policy, "ops": make_ops(isa, 2)}
    found = beside(trunks[family, pack], mates, sequences=sequences, **options).outcomes[0]
    assert found.ids == expected[family].ids[:SHORT]
    assert found.position_digests == expected[family].digests[:SHORT]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_mate_gets_what_it_gets_alone(nano_checkpoints, family):
    checkpoint, ops = nano_checkpoints[family], make_ops(ISAS[0], 2)
    together = beside(checkpoint, "others", sequences=3, ops=ops, budget="floor", chunk=5)
    for key, (prompt, count, temperature) in enumerate([*MATES["others"][0], *MATES["others"][1]], 1):
        sampling = Sampling(temperature=temperature, seed=key)
        alone = run(checkpoint, ops=make_ops("plain"), num_new=count, prompt=list(prompt), sampling=sampling)
        assert together.outcomes[key].ids == alone.ids
        assert together.outcomes[key].position_digests == alone.digests


@pytest.mark.matrix("family, num_new", (FAMILIES, (50, LONG)), sample=every_value)
def test_long_texts_stay_the_same_in_company(nano_checkpoints, expected, family, num_new):
    """Experts of a pass are more than the slots; mates come and go."""
    ops = make_ops(ISAS[0], 2)
    options = {"sequences": 3, "ops": ops, "budget": "floor", "chunk": 4, "context": len(PROMPT) + num_new}
    found = beside(nano_checkpoints[family], "others", num_new=num_new, **options).outcomes[0]
    assert found.ids == expected[family].ids[:num_new]
    assert found.position_digests == expected[family].digests[:num_new]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_numpy_definition_gives_the_same_logits_in_company(nano_checkpoints, expected, family):
    ops = make_ops("reference")
    found = beside(nano_checkpoints[family], "few", sequences=2, ops=ops, num_new=4, chunk=6).outcomes[0]
    assert found.position_digests == expected[family].digests[:4]


def test_batch_mates_are_not_inert(nano_checkpoints):
    """Passes are shared: fewer of them, with more rows, fewer bytes a row, and experts that differ."""
    checkpoint = nano_checkpoints["kimi-k3"]
    options = {"ops": make_ops(ISAS[0]), "budget": "floor", "chunk": 64}
    alone = beside(checkpoint, "alone", sequences=5, **options)
    others = beside(checkpoint, "others", sequences=5, **options)
    twins = beside(checkpoint, "twins", sequences=5, **options)
    one_by_one = beside(checkpoint, "others", sequences=1, **options)
    assert (alone.num_passes, alone.num_rows) == (SHORT, len(PROMPT) + SHORT - 1)
    assert one_by_one.num_rows == others.num_rows > 2 * others.num_passes
    assert one_by_one.num_passes > 2 * others.num_passes
    assert others.counters.bytes_trunk < one_by_one.counters.bytes_trunk / 2
    # Twins choose the same experts, so their company is cheaper than that of strangers.
    each = [found.counters.expert_requests / found.num_rows for found in (alone, others, twins)]
    assert each[2] < each[1] < each[0]
