"""Bodies of OpenAI's text completion: what is taken, what is refused and how it is named."""

from __future__ import annotations

import pytest

from twoends.errors import OptionError
from twoends.generate.completion import DEFAULT_NEW_TOKENS, parse_completion
from twoends.generate.sampler import Sampling
from twoends.generate.tokenizer import Tokenizer

VOCAB = 700


@pytest.fixture(scope="module")
def tokenizer(nano_dirs):
    return Tokenizer.open(nano_dirs["kimi-k3"], vocab_size=VOCAB + 68)


def parse(tokenizer, **body):
    return parse_completion(body, tokenizer=tokenizer, vocab_size=VOCAB)


def test_what_is_left_out_or_null_is_as_in_run(tokenizer):
    bare = parse(tokenizer, prompt=[1, 2])
    assert bare == parse(
        tokenizer, prompt=[1, 2], model=None, max_tokens=None, temperature=None, stop=None, n=None
    )
    assert (bare.ids, bare.num_new, bare.sampling, bare.stop) == ([1, 2], DEFAULT_NEW_TOKENS, Sampling(), ())
    assert bare.num_needed == 2 + DEFAULT_NEW_TOKENS


def test_every_known_field_is_used(tokenizer):
    found = parse(
        tokenizer,
        model="m",
        prompt="hello",
        max_tokens=7,
        temperature=0.5,
        top_p=0.9,
        top_k=4,
        seed=3,
        stop=["a", "b"],
        n=1,
    )
    assert found.sampling == Sampling(temperature=0.5, top_p=0.9, top_k=4, seed=3)
    assert (found.model, found.ids, found.num_new) == ("m", tokenizer.encode("hello"), 7)
    assert found.stop == ("a", "b")
    assert parse(tokenizer, prompt=[1], stop=".").stop == (".",)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"prompt": "x", "logprobs": 1}, "the field 'logprobs' is not known here"),
        (
            {"prompt": "x", "max_token": 1},
            "the field 'max_token' is not known here; did you mean 'max_tokens'",
        ),
        ({"prompt": "x", "stream": True}, "'stream'"),
        ({}, "no prompt"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": []}, "the prompt is empty"),
        ({"prompt": ["a", "b"]}, "one text or one list"),
        ({"prompt": [[1], [2]]}, "one text or one list"),
        ({"prompt": [1, True]}, "one text or one list"),
        ({"prompt": [1, 2.0]}, "one text or one list"),
        ({"prompt": {"a": 1}}, "one text or one list"),
        ({"prompt": [1, VOCAB]}, f"token id {VOCAB} of the prompt is not one of 0 to {VOCAB - 1}"),
        ({"prompt": [-1]}, "token id -1"),
        ({"prompt": "\ud800"}, "half of a surrogate pair"),
        ({"prompt": "x", "n": 2}, "n is 2"),
        ({"prompt": "x", "n": True}, "n is True"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens is 0"),
        ({"prompt": "x", "max_tokens": 1.5}, "max_tokens is 1.5"),
        ({"prompt": "x", "max_tokens": "5"}, "max_tokens is '5'"),
        ({"prompt": "x", "temperature": -1}, "temperature is -1"),
        ({"prompt": "x", "temperature": "hot"}, "temperature is 'hot'"),
        ({"prompt": "x", "top_p": 0}, "top_p is 0"),
        ({"prompt": "x", "top_k": -1}, "top_k is -1"),
        ({"prompt": "x", "seed": 1 << 64}, "seed is"),
        ({"prompt": "x", "stop": ""}, "has no character"),
        ({"prompt": "x", "stop": [""]}, "has no character"),
        ({"prompt": "x", "stop": [1]}, "has no character"),
        ({"prompt": "x", "stop": 1}, "a text or a list of texts"),
        ({"prompt": "x", "model": 1}, "model must be a string"),
    ],
)
def test_what_can_not_be_done_is_refused_by_its_name(tokenizer, body, says):
    with pytest.raises(OptionError) as caught:
        parse_completion(body, tokenizer=tokenizer, vocab_size=VOCAB)
    assert says in caught.value.headline


@pytest.mark.parametrize("body", [None, [], "x", 1])
def test_a_body_that_is_no_object_is_refused(tokenizer, body):
    with pytest.raises(OptionError, match="must be an object"):
        parse_completion(body, tokenizer=tokenizer, vocab_size=VOCAB)


@pytest.mark.parametrize("body", [{"prompt": "x"}, {"prompt": [1], "stop": "x"}])
def test_without_a_tokenizer_only_ids_can_be_done(body):
    with pytest.raises(OptionError, match="has no tokenizer"):
        parse_completion(body, tokenizer=None, vocab_size=VOCAB)
    assert parse_completion({"prompt": [1]}, tokenizer=None, vocab_size=VOCAB).ids == [1]
