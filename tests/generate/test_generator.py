"""The loop from prompt to text: how it ends, what it reports, and that it can be taken up again."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from tests.support.opened import StopAfter, generate, opened
from tests.support.running import PROMPT, Silent
from twoends.errors import DoesNotFit, NotSound, ReadError
from twoends.generate.generator import Generator
from twoends.generate.sampler import Sampling, pick
from twoends.generate.session import read_session, restore_state, save_session
from twoends.generate.tokenizer import Tokenizer

FAMILIES = ("kimi-k3", "kimi-linear")
LENGTH = 12
SAMPLED = Sampling(temperature=0.9, top_p=0.95, seed=5)


@pytest.fixture(scope="module")
def straight(nano_checkpoints):
    """(family, sampled) -> LENGTH tokens without a break."""
    found = {}
    for family, checkpoint in nano_checkpoints.items():
        for sampling in (None, SAMPLED):
            with opened(checkpoint) as model:
                found[family, sampling] = generate(
                    Generator(model, list(PROMPT), chunk=64), LENGTH, sampling=sampling
                )
    return found


class Told(Silent):
    """Remembers what a Progress was told."""

    def __init__(self):
        self.prefills, self.tokens, self.text, self.layers = [], [], "", 0

    def prefill(self, done, total):
        self.prefills.append((done, total))

    def layer(self, done):
        self.layers += 1

    def token(self, token_id, piece):
        self.tokens.append(token_id)
        self.text += piece.text

    def rest(self, text):
        self.text += text


def text_of(checkpoint, ids):
    tokenizer = Tokenizer.open(checkpoint.directory, vocab_size=checkpoint.config.vocab_size)
    data = b"".join(tokenizer.token_bytes(i) for i in ids if not tokenizer.is_special(i))
    return data.decode(errors="replace")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_to_its_length_reports_ids_text_times_and_digests(nano_checkpoints, straight, family):
    outcome = straight[family, None]
    assert outcome.finish == "length"
    assert len(outcome.ids) == len(outcome.position_digests) == LENGTH
    # The first id comes from the prompt's pass.
    assert len(outcome.token_s) == LENGTH - 1
    assert outcome.decode_s == sum(outcome.token_s)
    assert outcome.prefill_s > 0
    assert outcome.text == text_of(nano_checkpoints[family], outcome.ids)


def test_digests_are_of_the_binary32_logits_of_every_position(nano_checkpoints, straight):
    outcome = straight["kimi-k3", None]
    whole = hashlib.blake2b()
    with opened(nano_checkpoints["kimi-k3"]) as model:
        ids = list(PROMPT)
        logits_TW = model.run_pass(ids, layer_done=lambda done: None)
        for k in range(LENGTH):
            row = logits_TW[-1]
            assert row.dtype == np.float32
            whole.update(row.tobytes())
            assert outcome.position_digests[k] == hashlib.blake2b(row.tobytes(), digest_size=16).hexdigest()
            ids.append(pick(row, Sampling(), position=len(ids)))
            assert ids[-1] == outcome.ids[k]
            logits_TW = model.run_pass(ids[-1:], layer_done=lambda done: None)
    assert outcome.logits_digest == whole.hexdigest()


@pytest.mark.parametrize(
    ("chunk", "steps"),
    [
        (5, [(5, 12), (10, 12), (12, 12)]),
        (12, [(12, 12)]),
        (100, [(12, 12)]),
        (1, [(k, 12) for k in range(1, 13)]),
    ],
)
def test_progress_is_told_of_every_chunk_layer_token_and_piece(nano_checkpoints, straight, chunk, steps):
    checkpoint = nano_checkpoints["kimi-k3"]
    told = Told()
    with opened(checkpoint) as model:
        outcome = generate(Generator(model, list(PROMPT), chunk=chunk), 3, progress=told)
    assert told.prefills == steps
    assert told.layers == checkpoint.config.num_layers * (len(steps) + 2)
    assert told.tokens == outcome.ids == straight["kimi-k3", None].ids[:3]
    assert told.text == outcome.text


@pytest.mark.parametrize("at", [0, 4, LENGTH - 1])
def test_a_stop_id_ends_the_run_and_is_the_last_id(nano_checkpoints, straight, at):
    expected = straight["kimi-k3", SAMPLED]
    stop_id = expected.ids[at]
    first = expected.ids.index(stop_id)
    with opened(nano_checkpoints["kimi-k3"]) as model:
        outcome = generate(
            Generator(model, list(PROMPT), chunk=64), LENGTH, sampling=SAMPLED, stop_ids=[stop_id]
        )
    assert outcome.finish == "stop_id"
    assert outcome.ids == expected.ids[: first + 1]
    assert outcome.position_digests == expected.position_digests[: first + 1]


def test_a_stop_string_across_token_borders_cuts_the_text_not_the_ids(nano_checkpoints, straight):
    expected = straight["kimi-k3", SAMPLED]
    text = expected.text
    stop = text[2:5]
    assert len(stop) == 3
    with opened(nano_checkpoints["kimi-k3"]) as model:
        outcome = generate(
            Generator(model, list(PROMPT), chunk=64), LENGTH, sampling=SAMPLED, stop_strings=[stop]
        )
    assert outcome.finish == "stop_string"
    assert outcome.text == text[: text.index(stop)]
    assert outcome.ids == expected.ids[: len(outcome.ids)]


@pytest.mark.parametrize("sampling", [None, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("parts", [(1, 11), (7, 5), (4, 4, 4)])
def test_runs_one_after_the_other_on_one_generator_are_one_run(nano_checkpoints, straight, sampling, parts):
    expected = straight["kimi-k3", sampling]
    ids, digests = [], []
    with opened(nano_checkpoints["kimi-k3"], budget=0.2) as model:
        generator = Generator(model, list(PROMPT), chunk=5)
        for part in parts:
            outcome = generate(generator, part, sampling=sampling)
            ids += outcome.ids
            digests += outcome.position_digests
    assert (ids, digests) == (expected.ids, expected.position_digests)


def test_a_run_goes_on_after_a_stop_id(nano_checkpoints, straight):
    """More passes were announced than came; what was read ahead must serve the next run."""
    expected = straight["kimi-k3", SAMPLED]
    with opened(nano_checkpoints["kimi-k3"], budget="floor") as model:
        generator = Generator(model, list(PROMPT), chunk=64)
        first = generate(generator, LENGTH, sampling=SAMPLED, stop_ids=[expected.ids[3]])
        assert len(first.ids) < LENGTH
        rest = generate(generator, LENGTH - len(first.ids), sampling=SAMPLED)
    assert first.ids + rest.ids == expected.ids
    assert first.position_digests + rest.position_digests == expected.position_digests


def test_text_appended_between_two_runs_is_read_in_chunks_from_where_the_state_stands(nano_checkpoints):
    checkpoint = nano_checkpoints["kimi-linear"]
    with opened(checkpoint) as model:
        generator = Generator(model, list(PROMPT), chunk=4)
        first = generate(generator, 3)
        generator.ids += [7, 8, 9, 10, 11, 12]
        second = generate(generator, 3)
    with opened(checkpoint) as model:
        ids = [*PROMPT, *first.ids, 7, 8, 9, 10, 11, 12]
        once = generate(Generator(model, ids, chunk=64), 3)
    assert second.position_digests == once.position_digests


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sampling", [None, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("stop_after", [1, 2, 3, 4, 9])
def test_an_interrupted_run_continues_exactly_from_its_session(
    nano_checkpoints, straight, tmp_path, family, sampling, stop_after
):
    """Chunks of 5 make three passes of the prompt: stops 1 and 2 fall into it, the others after."""
    checkpoint, expected = nano_checkpoints[family], straight[family, sampling]
    with opened(checkpoint, budget=0.3, policy="lru") as model:
        generator = Generator(model, list(PROMPT), chunk=5)
        first = generate(generator, LENGTH, sampling=sampling, stop_asked=StopAfter(stop_after))
        assert first.finish == "interrupted"
        assert len(first.ids) == max(0, stop_after - 2)
        assert model.state.position == min(5 * stop_after, len(PROMPT)) + max(0, stop_after - 3)
        save_session(tmp_path / "s", checkpoint=checkpoint, ids=generator.ids, state=model.state)
    with opened(checkpoint) as model:
        saved = read_session(tmp_path / "s", checkpoint=checkpoint)
        restore_state(saved, model.state)
        rest = generate(Generator(model, saved.ids, chunk=64), LENGTH - len(first.ids), sampling=sampling)
    assert first.ids + rest.ids == expected.ids
    assert first.position_digests + rest.position_digests == expected.position_digests
    assert first.text + rest.text == expected.text


def test_a_stop_asked_with_the_last_token_is_no_interruption(nano_checkpoints):
    with opened(nano_checkpoints["kimi-k3"]) as model:
        outcome = generate(Generator(model, list(PROMPT), chunk=64), 1, stop_asked=lambda: True)
    assert outcome.finish == "length"


def test_a_draw_depends_on_its_position_not_on_the_way_there(nano_checkpoints, straight):
    """The same ids given as a prompt, instead of generated, draw the same next ids."""
    expected = straight["kimi-k3", SAMPLED]
    with opened(nano_checkpoints["kimi-k3"]) as model:
        generator = Generator(model, [*PROMPT, *expected.ids[:6]], chunk=3)
        assert generate(generator, LENGTH - 6, sampling=SAMPLED).ids == expected.ids[6:]


def test_the_context_cannot_be_exceeded_silently(nano_checkpoints):
    with opened(nano_checkpoints["kimi-k3"], context=len(PROMPT) + 3) as model:
        generator = Generator(model, list(PROMPT), chunk=64)
        # The last id needs no place: it has not gone through.
        assert len(generate(generator, 4).ids) == 4
        with pytest.raises(DoesNotFit, match="context of 15 tokens is full"):
            generate(generator, 1)


@pytest.mark.parametrize("ids", [[], [768], [-1]])
def test_a_pass_takes_ids_of_the_vocabulary_only(nano_checkpoints, ids):
    """An id beyond the table would read the bytes that lie behind it, and look like a token."""
    with opened(nano_checkpoints["kimi-k3"]) as model, pytest.raises(AssertionError):
        model.run_pass(ids, layer_done=lambda done: None)


def test_there_must_be_an_id_that_has_not_gone_through(nano_checkpoints):
    with opened(nano_checkpoints["kimi-k3"]) as model, pytest.raises(AssertionError):
        Generator(model, [], chunk=4)


@pytest.mark.parametrize("failing", [1, 20, 200])
def test_a_read_error_in_the_middle_ends_the_run_and_closing_does_not_hang(nano_checkpoints, failing):
    from twoends.engine.files import read_at

    count = []

    def broken(fd, buffer, offset):
        count.append(offset)
        if len(count) >= failing:
            raise OSError(5, "Input/output error")
        return read_at(fd, buffer, offset)

    with (
        opened(nano_checkpoints["kimi-k3"], budget="floor", read=broken) as model,
        pytest.raises(ReadError, match="Input/output error"),
    ):
        generate(Generator(model, list(PROMPT), chunk=5), 20)
    assert len(count) >= failing


def test_logits_that_are_not_finite_give_no_token(nano_checkpoints, monkeypatch):
    with opened(nano_checkpoints["kimi-k3"]) as model:
        generator = Generator(model, list(PROMPT), chunk=64)
        generate(generator, 2)
        bad_W = np.zeros((1, 768), np.float32)
        bad_W[0, 17] = np.nan
        monkeypatch.setattr(model, "run_pass", lambda ids, layer_done: bad_W)
        with pytest.raises(NotSound, match="not finite"):
            generate(generator, 3)
        assert len(generator.ids) == len(PROMPT) + 2
