"""Drafts: who is asked first, what a draft model's own state does when it was wrong, and who is refused."""

from __future__ import annotations

import dataclasses
import shutil

import numpy as np
import pytest

from tests.support.backends import native_isas
from tests.support.opened import generate, opened
from tests.support.running import PROMPT, make_ops, open_draft
from twoends.checkpoint.presets import preset_config
from twoends.checkpoint.tiny import write_tiny
from twoends.engine.open import Checkpoint
from twoends.errors import DoesNotFit, OptionError
from twoends.generate.draft_model import DraftModel, plan_draft_model, refuse_other_vocabulary
from twoends.generate.drafts import Drafts, Tally
from twoends.generate.generator import Generator
from twoends.generate.sampler import Sampling
from twoends.generate.tokenizer import Tokenizer

FAMILIES = ("kimi-k3", "kimi-linear")
ISA = (native_isas() or ["reference"])[0]


class Saying:
    """A drafter that says what it was told to, and remembers what it heard."""

    def __init__(self, *proposals, bytes_per_id=0):
        self._proposals, self.bytes_per_id = list(proposals), bytes_per_id
        self.heard = []

    def propose(self, ids, count):
        return self._proposals.pop(0)[:count]

    def accept(self, count):
        self.heard.append(count)


def drafts_of(sources, *, most=5, streamed=10**9, experts=10**7):
    return Drafts(sources, most=most, streamed_bytes=streamed, expert_bytes=experts)


def test_the_model_is_asked_only_when_the_text_suggests_nothing():
    text, model = Saying([7], [], []), Saying([8, 9], [])
    drafts = drafts_of({"lookup": text, "model": model})
    assert drafts.propose([1], most=5) == [7]
    drafts.learn(drafted=1, accepted=0)
    assert drafts.propose([1, 2], most=5) == [8, 9]
    drafts.learn(drafted=2, accepted=2)
    assert drafts.propose([1, 2, 8, 9], most=5) == []
    assert (text.heard, model.heard) == ([0], [2])
    assert dataclasses.astuple(drafts.tallies["lookup"]) == (1, 0, [1], [0])
    assert dataclasses.astuple(drafts.tallies["model"]) == (2, 2, [1, 1], [1, 1])


def test_a_tally_tells_each_place_of_a_proposal_apart():
    tally = Tally()
    for drafted, accepted in ((3, 1), (1, 1), (4, 4), (2, 0)):
        tally.add(drafted=drafted, accepted=accepted)
    assert (tally.tried, tally.right) == ([4, 2, 1, 1], [3, 1, 1, 1])
    assert (tally.drafted, tally.accepted) == (10, sum(tally.right))


def test_the_source_that_was_right_lately_is_asked_first_but_for_every_sixteenth_time():
    text, model = Saying(*[[1]] * 40), Saying(*[[2]] * 40)
    drafts = drafts_of({"lookup": text, "model": model})
    first = []
    for _ in range(33):
        first += drafts.propose([0], most=5)
        drafts.learn(drafted=1, accepted=first[-1] - 1)
    assert first[:3] == [1, 2, 2], "the text is asked until it is wrong"
    assert [n for n, said in enumerate(first, 1) if said == 1] == [1, 16, 32]


def test_each_source_learns_its_own_length():
    text, model = Saying(*[[1] * 7] * 60), Saying(*[[2] * 7] * 60)
    drafts = drafts_of({"lookup": text, "model": model}, most=7, experts=10**9)
    for _ in range(40):
        drafted = drafts.propose([0], most=7)
        drafts.learn(drafted=len(drafted), accepted=0 if drafted[0] == 1 else len(drafted))
        if drafts._lengths["lookup"].choose() == 0:
            break
    assert drafts.propose([0], most=7)[0] == 2, "the text was never right; the model is asked"


def test_a_source_that_reads_more_than_it_saves_is_not_asked():
    dear = Saying([1], bytes_per_id=10**9)
    assert drafts_of({"model": dear}).propose([0], most=5) == []


@pytest.mark.parametrize("most", [0, 1, 3])
def test_no_more_is_proposed_than_may_be_used(most):
    assert len(drafts_of({"model": Saying([1] * 9)}).propose([0], most=most)) == most


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_that_drafts_for_itself_is_always_right_greedy_and_sampled(nano_checkpoints, family):
    for sampling in (Sampling(), Sampling(temperature=0.8, seed=4)):
        truth = _text_of(nano_checkpoints[family], 12, sampling)
        model = open_draft(nano_checkpoints[family], make_ops(ISA), context=40)
        try:
            drafter = DraftModel(model, sampling=sampling)
            assert drafter.propose(list(PROMPT), 4) == truth[:4]
            drafter.accept(4)
            assert drafter.propose([*PROMPT, *truth[:5]], 3) == truth[5:8]
        finally:
            model.close()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("right", [0, 1, 3])
def test_wrong_guesses_leave_no_trace_in_the_draft_models_state(nano_checkpoints, family, right):
    """What it guesses after a refusal is what it guesses when it never made the wrong guesses."""
    ops = make_ops(ISA)
    one = open_draft(nano_checkpoints[family], ops, context=40, budget=0.1)
    other = open_draft(nano_checkpoints[family], ops, context=40, budget=0.1)
    try:
        drafter = DraftModel(one, sampling=Sampling())
        guess = drafter.propose(list(PROMPT), 4)
        drafter.accept(right)
        known = [*PROMPT, *guess[:right], 99]
        found = drafter.propose(known, 3)
        assert found == DraftModel(other, sampling=Sampling()).propose(known, 3)
        drafter.accept(0)
        other.state.position = one.state.position
        for (name, array), (_, expected) in zip(one.state.arrays(), other.state.arrays(), strict=True):
            if name.endswith("cache"):
                np.testing.assert_array_equal(array, expected, err_msg=name)
    finally:
        one.close()
        other.close()


def _text_of(checkpoint, count, sampling):
    with opened(checkpoint) as model:
        return generate(Generator(model, list(PROMPT), chunk=64), count, sampling=sampling).ids


def tokenizers(*checkpoints):
    return [Tokenizer.open(c.directory, vocab_size=c.config.vocab_size) for c in checkpoints]


def test_another_size_of_vocabulary_is_refused_with_both_sizes(nano_checkpoints, tmp_path):
    write_tiny(tmp_path / "mini", preset="mini", num_layers=2, sparse=True)
    draft = Checkpoint.open(tmp_path / "mini")
    this = nano_checkpoints["kimi-k3"]
    with pytest.raises(OptionError, match="mini has another tokenizer than nano") as error:
        refuse_other_vocabulary(this, None, draft, None)
    found = preset_config("mini").vocab_size
    assert ("size of the vocabulary", f"{found:,}", "draft model") in error.value.evidence


def test_one_token_with_other_bytes_is_refused_with_its_id_and_both(nano_checkpoints, tmp_path):
    this = nano_checkpoints["kimi-k3"]
    shutil.copytree(this.directory, tmp_path / "draft")
    path = tmp_path / "draft" / "tiktoken.model"
    lines = path.read_bytes().splitlines(keepends=True)
    lines[300], lines[301] = (
        b" ".join([a.split()[0], b.split()[1]]) + b"\n"
        for a, b in ((lines[301], lines[300]), (lines[300], lines[301]))
    )
    path.write_bytes(b"".join(lines))
    draft = Checkpoint.open(tmp_path / "draft")
    with pytest.raises(OptionError, match="has another tokenizer") as error:
        refuse_other_vocabulary(this, *_between(tokenizers(this, draft), draft))
    assert {row[0] for row in error.value.evidence} == {"id 300"}
    same = tokenizers(this, this)
    refuse_other_vocabulary(this, same[0], draft, same[1])


def _between(pair, draft):
    return pair[0], draft, pair[1]


def test_a_draft_model_is_whole_in_a_large_budget_and_small_in_a_small_one(nano_checkpoints):
    draft = nano_checkpoints["kimi-k3"]
    whole, size = plan_draft_model(draft, ram_bytes=10**12, context_tokens=50)
    assert whole.streamed_bytes_per_pass == 0
    assert size > whole.total_bytes
    small, _ = plan_draft_model(draft, ram_bytes=whole.floor_bytes * 4, context_tokens=50)
    assert small.total_bytes <= whole.floor_bytes < whole.total_bytes
    with pytest.raises(DoesNotFit):
        plan_draft_model(draft, ram_bytes=whole.floor_bytes - 1, context_tokens=50)
