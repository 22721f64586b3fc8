"""The first promise, with guesses: whoever guesses, rows are kept and taken back and no bit changes."""

from __future__ import annotations

import functools

import pytest

from tests.contract.axes import FAMILIES, assert_same
from tests.support.backends import native_isas
from tests.support.covering import every_pair
from tests.support.draft_layers import write_by_heart, write_random
from tests.support.running import PROMPT, make_ops, run
from twoends.checkpoint.tiny import write_tiny
from twoends.engine.open import Checkpoint
from twoends.generate import drafts
from twoends.generate.sampler import Sampling

ISAS = native_isas()
SAMPLINGS = {"greedy": Sampling(), "sampled": Sampling(temperature=0.7, seed=3)}
GUESSERS = ("itself", "stranger")
LAYERS = ("by heart", "stranger")
NUM_NEW = 34

pytestmark = pytest.mark.skipif(not ISAS, reason="the native kernels are not built")


class Prophet:
    """Stands in for the prompt lookup: drafts the true text, with every seventh id wrong."""

    truth: list[int]

    def __init__(self, capacity, *, before=()):
        self._known = 0

    def extend(self, ids):
        self._known = len(ids)

    def draft(self, most):
        at = self._known - len(PROMPT)
        coming = self.truth[at : at + most]
        return [(i + 1) % 700 if (at + n) % 5 == 4 else i for n, i in enumerate(coming)]


@pytest.fixture(scope="module")
def undrafted(nano_checkpoints):
    """Gives, for a family and a sampling, the run of NUM_NEW ids without guesses; each is made once."""

    @functools.cache
    def made(family, sampling):
        ops = make_ops("plain")
        return run(
            nano_checkpoints[family], ops=ops, num_new=NUM_NEW, sampling=SAMPLINGS[sampling], budget="floor"
        )

    return made


@pytest.mark.matrix("family, isa, sampling", (FAMILIES, ISAS, tuple(SAMPLINGS)), sample=every_pair)
def test_drafts_change_no_bit(nano_checkpoints, undrafted, tmp_path, monkeypatch, family, isa, sampling):
    """Drafts that are partly right: rows are kept and rows are taken back, across a session break."""
    plain = undrafted(family, sampling)
    monkeypatch.setattr(Prophet, "truth", plain.ids, raising=False)
    monkeypatch.setattr(drafts, "PromptLookup", Prophet)
    drafted = run(
        nano_checkpoints[family],
        ops=make_ops(isa, 2),
        num_new=NUM_NEW,
        sampling=SAMPLINGS[sampling],
        budget="floor",
        draft=5,
        save_after=18,
        tmp_path=tmp_path,
    )
    assert_same(drafted, plain)
    assert drafted.drafted > drafted.accepted > 12
    # A session break costs its second run a first pass; the drafts save far more.
    assert drafted.counters.bytes_trunk < plain.counters.bytes_trunk * 0.4


@pytest.fixture(scope="module")
def draft_models(nano_checkpoints, tmp_path_factory):
    """(family, name) -> a model that guesses: the model itself, always right, or a stranger, mostly wrong."""
    found = {(family, "itself"): checkpoint for family, checkpoint in nano_checkpoints.items()}
    for family in FAMILIES:
        directory = tmp_path_factory.mktemp(f"stranger-{family}") / "nano"
        write_tiny(directory, preset="nano", family=family, seed=5)
        found[family, "stranger"] = Checkpoint.open(directory)
    return found


@pytest.mark.matrix("family, name, sampling", (FAMILIES, GUESSERS, tuple(SAMPLINGS)), sample=every_pair)
def test_a_draft_model_changes_no_bit(
    nano_checkpoints, undrafted, draft_models, tmp_path, family, name, sampling
):
    """With the lookup before it, over a session break."""
    plain = undrafted(family, sampling)
    drafted = run(
        nano_checkpoints[family],
        ops=make_ops(ISAS[0], 2),
        num_new=NUM_NEW,
        sampling=SAMPLINGS[sampling],
        budget="floor",
        draft=4,
        draft_model=draft_models[family, name],
        save_after=11,
        tmp_path=tmp_path,
    )
    assert_same(drafted, plain)
    tally = drafted.drafts["model"]
    if name == "itself":
        assert tally.accepted == tally.drafted > 15
        assert drafted.counters.bytes_trunk < plain.counters.bytes_trunk * 0.5
    else:
        assert tally.drafted > 4
        assert tally.accepted < tally.drafted


LAYER_AXES = (FAMILIES, ISAS, LAYERS, ("none", "fixed"), tuple(SAMPLINGS))


@pytest.mark.matrix("family, isa, layer, pack, sampling", LAYER_AXES, sample=every_pair)
def test_a_draft_layer_changes_no_bit(
    nano_checkpoints, trunks, undrafted, tmp_path, family, isa, layer, pack, sampling
):
    """One that knows the text, so that rows are kept, and one that is wrong; over a session break."""
    plain = undrafted(family, sampling)
    if layer == "by heart":
        made = write_by_heart(nano_checkpoints[family], tmp_path / "draft", [*PROMPT, *plain.ids])
    else:
        made = write_random(nano_checkpoints[family], tmp_path / "draft")
    drafted = run(
        trunks[family, pack],
        ops=make_ops(isa, 2),
        num_new=NUM_NEW,
        sampling=SAMPLINGS[sampling],
        budget="floor",
        chunk=5,
        draft=4,
        draft_model=made,
        save_after=17,
        tmp_path=tmp_path,
    )
    assert_same(drafted, plain)
    tally = drafted.drafts["model"]
    if layer == "by heart":
        assert tally.drafted >= tally.accepted > 5
        assert drafted.counters.bytes_trunk < plain.counters.bytes_trunk
    else:
        assert tally.drafted > 4
        assert tally.accepted < tally.drafted


@pytest.mark.parametrize("family", FAMILIES)
def test_an_earlier_answer_to_the_same_prompt_changes_no_bit_and_halves_the_bytes(
    nano_checkpoints, undrafted, family
):
    plain = undrafted(family, "greedy")
    again = run(
        nano_checkpoints[family],
        ops=make_ops("plain"),
        num_new=NUM_NEW,
        budget="floor",
        draft=7,
        earlier=[*PROMPT, *plain.ids],
    )
    assert_same(again, plain)
    assert again.accepted > 0.9 * again.drafted > 20
    assert again.counters.bytes_read < plain.counters.bytes_read * 0.5


@pytest.mark.parametrize("family", FAMILIES)
def test_prompt_lookup_changes_no_bit(nano_checkpoints, expected, family):
    checkpoint = nano_checkpoints[family]
    first = expected[family].ids[:30]
    prompt = [*PROMPT, *first, *PROMPT, *first[:8]]
    options = {"num_new": 16, "prompt": prompt, "budget": "floor", "chunk": 64}
    plain = run(checkpoint, ops=make_ops("plain"), **options)
    drafted = run(checkpoint, ops=make_ops("plain"), draft=5, **options)
    assert_same(drafted, plain)
    assert drafted.drafted > 0
