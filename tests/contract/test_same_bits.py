"""The first promise: the same bits at every budget, thread count, CPU, chunk, policy, break, pack or none,
whoever shares the passes.

The reference case runs in ample memory on one thread in plain C++ with the whole prompt as one
chunk; every other case must give its ids and the digest of its binary32 logits at every position.
Released buffers are overwritten with NaN patterns throughout.
"""

from __future__ import annotations

import itertools

import pytest

from tests.support.backends import native_isas
from tests.support.running import PROMPT, make_ops, run
from tests.support.together import request, run_together
from twoends.checkpoint.pack_write import write_pack
from twoends.engine.open import Checkpoint
from twoends.engine.reader import ReadShape
from twoends.generate import generator
from twoends.generate.sampler import Sampling

FAMILIES = ("kimi-k3", "kimi-linear")
BUDGETS = ("floor", 0.1, "ample")
CHUNKS = (1, 3, 64, len(PROMPT))
POLICIES = ("decayed", "lru")
# How each is written: in one place, over three stripes, with the routed experts.
PACKS = {
    "none": {},
    "fixed": {"code": "fixed"},
    "entropy": {"code": "entropy"},
    "striped": {"code": "fixed", "stripes": 3},
    "experts": {"code": "entropy", "experts": True},
}
LONG = 200
SHORT = 6

pytestmark = pytest.mark.skipif(not native_isas(), reason="the native kernels are not built")


@pytest.fixture(scope="module")
def expected(nano_checkpoints):
    """family -> the reference run of LONG tokens."""
    return {
        family: run(checkpoint, ops=make_ops("plain"), num_new=LONG, chunk=len(PROMPT))
        for family, checkpoint in nano_checkpoints.items()
    }


@pytest.fixture(scope="module")
def trunks(nano_checkpoints, tmp_path_factory):
    """(family, pack) -> the checkpoint as it is, or from one of the PACKS of it."""
    found = {(family, "none"): checkpoint for family, checkpoint in nano_checkpoints.items()}
    for family, checkpoint in nano_checkpoints.items():
        place = tmp_path_factory.mktemp(f"packs-{family}")
        for pack, options in list(PACKS.items())[1:]:
            stripes = tuple(place / f"stripe-{i}" for i in range(options.get("stripes", 0)))
            write_pack(checkpoint.index, place / pack, **(options | {"stripes": stripes}))
            found[family, pack] = Checkpoint.open(place / pack)
    return found


def assert_same(found, expected):
    count = len(found.ids)
    assert found.ids == expected.ids[:count]
    assert found.digests == expected.digests[:count]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("isa", native_isas())
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("pack", PACKS)
def test_every_combination_gives_the_same_logits(
    request, trunks, expected, tmp_path, family, isa, threads, pack
):
    """Budgets, chunks, policies and a session break in every combination, SHORT tokens each.

    Every fifth of the 48 on the widest instruction set with two threads without a pack; elsewhere every
    17th, which meets each value with several others; --matrix=full (as CI runs it) asks for all.
    """
    cases = list(itertools.product(BUDGETS, CHUNKS, POLICIES, (None, 3)))
    whole = (isa, threads, pack) == (native_isas()[0], 2, "none")
    if request.config.getoption("--matrix") != "full":
        cases = cases[threads :: 5 if whole else 17]
        if pack != "none" and (threads + native_isas().index(isa) + list(PACKS).index(pack)) % 2:
            pytest.skip("only with --matrix=full; the other thread count runs, or the next instruction set")
        if pack == "striped" and isa != native_isas()[0]:
            pytest.skip("only with --matrix=full; where bytes lie is nothing to an instruction set")
    ops = make_ops(isa, threads)
    for budget, chunk, policy, save_after in cases:
        found = run(
            trunks[family, pack],
            ops=ops,
            num_new=SHORT,
            budget=budget,
            chunk=chunk,
            policy=policy,
            save_after=save_after,
            tmp_path=tmp_path,
        )
        assert_same(found, expected[family])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("isa", native_isas())
@pytest.mark.parametrize(
    ("budget", "chunk", "policy", "save_after"),
    [("floor", 3, "decayed", None), (0.1, 64, "lru", 77), ("ample", 1, "decayed", 150)],
)
def test_long_runs_stay_the_same(
    request, nano_checkpoints, expected, tmp_path, family, isa, budget, chunk, policy, save_after
):
    """The widest set runs all three; the others the one with most changes, unless --matrix=full."""
    whole = request.config.getoption("--matrix") == "full" or isa == native_isas()[0]
    if not whole and (policy != "lru" or isa == "plain"):
        pytest.skip("only with --matrix=full; what is expected is a long plain run already")
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


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("pack", ["none", "experts"])
def test_the_numpy_definition_gives_the_same_logits(trunks, expected, family, pack):
    found = run(trunks[family, pack], ops=make_ops("reference"), num_new=4, budget="floor", chunk=5)
    assert_same(found, expected[family])


@pytest.mark.parametrize("family", FAMILIES)
def test_sampled_text_is_the_same_at_every_budget_and_break(nano_checkpoints, tmp_path, family):
    sampling = Sampling(temperature=0.9, top_p=0.95, seed=7)
    checkpoint = nano_checkpoints[family]
    plain = run(checkpoint, ops=make_ops("plain"), num_new=40, sampling=sampling)
    other = run(
        checkpoint,
        ops=make_ops(native_isas()[0], 2),
        num_new=40,
        sampling=sampling,
        budget="floor",
        chunk=2,
        save_after=13,
        tmp_path=tmp_path,
    )
    assert_same(other, plain)
    reseeded = run(
        checkpoint, ops=make_ops("plain"), num_new=40, sampling=Sampling(temperature=0.9, top_p=0.95, seed=8)
    )
    assert reseeded.ids != plain.ids


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


# Who shares the passes with PROMPT: (prompt, new tokens, temperature) of each, those before it and after it.
MATES = {
    "alone": ([], []),
    "others": ([([7, 7, 8], 3, 0.0), (range(100, 121), 9, 0.8)], [([1], 12, 0.0), (range(400, 405), 2, 1.0)]),
    "twins": ([(PROMPT, SHORT, 0.0), (PROMPT, 2, 0.0)], [(PROMPT, SHORT, 0.7)]),
}


def beside(checkpoint, mates, *, sequences, num_new=SHORT, **options):
    """PROMPT (key 0) with its mates, each of whom has a key of its own."""
    before, after = MATES[mates]
    made = [
        request(checkpoint, key, prompt, count, sampling=Sampling(temperature=temperature, seed=key))
        for key, (prompt, count, temperature) in enumerate([*before, *after], 1)
    ]
    made.insert(len(before), request(checkpoint, 0, PROMPT, num_new))
    return run_together(checkpoint, made, sequences=sequences, **options)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("isa", native_isas())
@pytest.mark.parametrize("mates", list(MATES))
def test_batch_mates_change_no_bit(request, trunks, expected, family, isa, mates):
    """In company, in a place that another has left, in chunks of any size, at every budget and pack.

    Every 11th of the 72 on the widest instruction set, every 29th elsewhere; all with --matrix=full.
    """
    cases = list(itertools.product(BUDGETS, (1, 3, 64), (2, 8), ("decayed", "lru"), ("none", "fixed")))
    if request.config.getoption("--matrix") != "full":
        cases = cases[:: 11 if isa == native_isas()[0] else 29]
    ops = make_ops(isa, 2)
    for budget, chunk, sequences, policy, pack in cases:
        checkpoint = trunks[family, pack]
        options = {"budget": budget, "chunk": chunk, "policy": policy, "ops": ops}
        found = beside(checkpoint, mates, sequences=sequences, **options).outcomes[0]
        assert found.ids == expected[family].ids[:SHORT]
        assert found.position_digests == expected[family].digests[:SHORT]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_mate_gets_what_it_gets_alone(nano_checkpoints, family):
    checkpoint, ops = nano_checkpoints[family], make_ops(native_isas()[0], 2)
    together = beside(checkpoint, "others", sequences=3, ops=ops, budget="floor", chunk=5)
    for key, (prompt, count, temperature) in enumerate([*MATES["others"][0], *MATES["others"][1]], 1):
        sampling = Sampling(temperature=temperature, seed=key)
        alone = run(checkpoint, ops=make_ops("plain"), num_new=count, prompt=list(prompt), sampling=sampling)
        assert together.outcomes[key].ids == alone.ids
        assert together.outcomes[key].position_digests == alone.digests


@pytest.mark.parametrize("family", FAMILIES)
def test_long_texts_stay_the_same_in_company(nano_checkpoints, expected, family):
    """Experts of a pass are more than the slots; mates come and go."""
    ops = make_ops(native_isas()[0], 2)
    options = {"sequences": 3, "ops": ops, "budget": "floor", "chunk": 4, "context": len(PROMPT) + LONG}
    found = beside(nano_checkpoints[family], "others", num_new=LONG, **options).outcomes[0]
    assert found.ids == expected[family].ids
    assert found.position_digests == expected[family].digests


@pytest.mark.parametrize("family", FAMILIES)
def test_the_numpy_definition_gives_the_same_logits_in_company(nano_checkpoints, expected, family):
    ops = make_ops("reference")
    found = beside(nano_checkpoints[family], "others", sequences=3, ops=ops, num_new=4, chunk=6).outcomes[0]
    assert found.position_digests == expected[family].digests[:4]


def test_batch_mates_are_not_inert(nano_checkpoints):
    """Passes are shared: fewer of them, with more rows, fewer bytes a row, and experts that differ."""
    checkpoint = nano_checkpoints["kimi-k3"]
    options = {"ops": make_ops(native_isas()[0]), "budget": "floor", "chunk": 64}
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


class Prophet:
    """Stands in for the prompt lookup: drafts the true text, with every seventh id wrong."""

    truth: list[int]

    def __init__(self):
        self._known = 0

    def extend(self, ids):
        self._known = len(ids)

    def draft(self, most):
        at = self._known - len(PROMPT)
        coming = self.truth[at : at + most]
        return [(i + 1) % 700 if (at + n) % 5 == 4 else i for n, i in enumerate(coming)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("isa", native_isas())
@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=0.7, seed=3)], ids=["greedy", "sampled"]
)
def test_drafts_change_no_bit(request, nano_checkpoints, tmp_path, monkeypatch, family, isa, sampling):
    """Drafts that are partly right: rows are kept and rows are taken back, across a session break."""
    whole = request.config.getoption("--matrix") == "full" or isa == native_isas()[0]
    if not whole and sampling.temperature == 0:
        pytest.skip("only with --matrix=full")
    checkpoint = nano_checkpoints[family]
    plain = run(checkpoint, ops=make_ops("plain"), num_new=40, sampling=sampling, budget="floor")
    monkeypatch.setattr(Prophet, "truth", plain.ids, raising=False)
    monkeypatch.setattr(generator, "PromptLookup", Prophet)
    drafted = run(
        checkpoint,
        ops=make_ops(isa, 2),
        num_new=40,
        sampling=sampling,
        budget="floor",
        draft=5,
        save_after=21,
        tmp_path=tmp_path,
    )
    assert_same(drafted, plain)
    assert drafted.drafted > drafted.accepted > 12
    # A session break costs its second run a first pass; the drafts save far more.
    assert drafted.counters.bytes_trunk < plain.counters.bytes_trunk * 0.4


@pytest.mark.parametrize("family", FAMILIES)
def test_prompt_lookup_changes_no_bit(nano_checkpoints, family):
    checkpoint = nano_checkpoints[family]
    first = run(checkpoint, ops=make_ops("plain"), num_new=30)
    prompt = [*PROMPT, *first.ids, *PROMPT, *first.ids[:8]]
    options = {"num_new": 30, "prompt": prompt, "budget": "floor", "chunk": 64}
    plain = run(checkpoint, ops=make_ops("plain"), **options)
    drafted = run(checkpoint, ops=make_ops("plain"), draft=5, **options)
    assert_same(drafted, plain)
    assert drafted.drafted > 0


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("budget", [0.1, 0.5])
@pytest.mark.parametrize(
    "shape", [ReadShape(piece_bytes=4096, depth=1), ReadShape(piece_bytes=2**23, depth=8)]
)
def test_how_a_device_is_read_changes_no_bit(nano_checkpoints, expected, family, budget, shape):
    ops = make_ops(native_isas()[0], 2)
    found = run(nano_checkpoints[family], ops=ops, num_new=SHORT, budget=budget, read_shape=shape)
    assert_same(found, expected[family])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("budget", [0.1, 0.5])
def test_a_profile_of_another_run_changes_no_bit(nano_checkpoints, expected, family, budget):
    ops = make_ops(native_isas()[0], 2)
    other = run(nano_checkpoints[family], ops=ops, num_new=SHORT, prompt=[7, 7, 8], budget=budget)
    found = run(nano_checkpoints[family], ops=ops, num_new=SHORT, budget=budget, profile=other.profile)
    assert_same(found, expected[family])


def test_neither_read_shape_nor_profile_is_inert(nano_checkpoints):
    """Smaller pieces are more reads; a profile changes which experts stay."""
    checkpoint = nano_checkpoints["kimi-k3"]
    plain = run(checkpoint, ops=make_ops(native_isas()[0]), num_new=40, budget=0.5)
    small = run(
        checkpoint,
        ops=make_ops(native_isas()[0]),
        num_new=40,
        budget=0.5,
        read_shape=ReadShape(piece_bytes=4096, depth=1),
    )
    assert small.counters.num_reads > plain.counters.num_reads
    warm = run(checkpoint, ops=make_ops(native_isas()[0]), num_new=40, budget=0.5, profile=plain.profile)
    assert warm.counters.expert_hits != plain.counters.expert_hits


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
