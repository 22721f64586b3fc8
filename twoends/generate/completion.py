"""OpenAI's text completion: a request's body checked field by field, and the body of its answer.

Fields that are left out (or null) have the defaults of `twoends run`. A field that is not known here
is refused by its name: what is asked for is done, or nothing is.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from twoends.errors import OptionError
from twoends.generate.generator import Outcome
from twoends.generate.sampler import Sampling
from twoends.generate.stop import StopMatcher
from twoends.generate.tokenizer import Tokenizer

DEFAULT_NEW_TOKENS = 64
_FIELDS = ("model", "prompt", "max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "n")
_REASONS = {"stop_id": "stop", "stop_string": "stop", "length": "length"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A request that was found right. `model` is what the caller calls the model."""

    model: str | None
    ids: list[int]
    num_new: int
    sampling: Sampling
    stop: tuple[str, ...]

    @property
    def num_needed(self) -> int:
        """Room that the request needs at most, in tokens."""
        return len(self.ids) + self.num_new


def parse_completion(body: object, *, tokenizer: Tokenizer | None, vocab_size: int) -> Completion:
    """The request that a body makes. Raises OptionError, or TokenizerError, for what can't be done."""
    if not isinstance(body, Mapping):
        raise OptionError("the body must be an object.")
    unknown = [name for name in body if name not in _FIELDS]
    if unknown:
        near = difflib.get_close_matches(unknown[0], _FIELDS, n=1, cutoff=0.6)
        did_you = f"; did you mean '{near[0]}'" if near else ""
        raise OptionError(f"the field '{unknown[0]}' is not known here{did_you}.")
    given = {name: value for name, value in body.items() if value is not None}
    if _whole(given, "n", 1, least=1) != 1:
        raise OptionError(f"n is {given['n']}; one completion a request is made, so n must be 1.")
    model = given.get("model")
    if model is not None and not isinstance(model, str):
        raise OptionError("model must be a string.")
    sampling = Sampling(
        temperature=given.get("temperature", 0.0),
        top_p=given.get("top_p", 1.0),
        top_k=given.get("top_k", 0),
        seed=given.get("seed", 0),
    )
    return Completion(
        model=model,
        ids=_prompt(given, tokenizer, vocab_size),
        num_new=_whole(given, "max_tokens", DEFAULT_NEW_TOKENS, least=1),
        sampling=sampling,
        stop=_stop(given, tokenizer),
    )


def completion_object(
    completion: Completion, outcome: Outcome, *, name: str, created: int, model: str, fingerprint: str
) -> dict[str, Any]:
    """The body of the answer. `token_ids` and `logits_digest` are ours: what another run must equal."""
    choice = {
        "index": 0,
        "text": outcome.text,
        "token_ids": outcome.ids,
        "logits_digest": outcome.logits_digest,
        "logprobs": None,
        "finish_reason": _REASONS[outcome.finish],
    }
    num_prompt, num_new = len(completion.ids), len(outcome.ids)
    return {
        "id": f"cmpl-{name}",
        "object": "text_completion",
        "created": created,
        "model": completion.model or model,
        "system_fingerprint": fingerprint,
        "choices": [choice],
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_new,
            "total_tokens": num_prompt + num_new,
        },
    }


def _prompt(given: Mapping[str, Any], tokenizer: Tokenizer | None, vocab_size: int) -> list[int]:
    prompt = given.get("prompt")
    match prompt:
        case str():
            ids = _encode(prompt, tokenizer)
        case [*parts] if all(isinstance(part, int) and not isinstance(part, bool) for part in parts):
            ids = list(parts)
        case None:
            raise OptionError("there is no prompt.")
        case _:
            raise OptionError("prompt must be one text or one list of token ids.")
    if not ids:
        raise OptionError("the prompt is empty.")
    wrong = [i for i in ids if not 0 <= i < vocab_size]
    if wrong:
        raise OptionError(f"token id {wrong[0]} of the prompt is not one of 0 to {vocab_size - 1}.")
    return ids


def _encode(text: str, tokenizer: Tokenizer | None) -> list[int]:
    if tokenizer is None:
        raise OptionError("this checkpoint has no tokenizer; the prompt must be token ids.")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise OptionError(f"character {error.start} of the prompt is half of a surrogate pair.") from None
    return tokenizer.encode(text)


def _stop(given: Mapping[str, Any], tokenizer: Tokenizer | None) -> tuple[str, ...]:
    stop = given.get("stop", [])
    if isinstance(stop, str):
        stop = [stop]
    if not isinstance(stop, list):
        raise OptionError("stop must be a text or a list of texts.")
    StopMatcher(stop)
    if stop and tokenizer is None:
        raise OptionError("this checkpoint has no tokenizer; there is no text that stop could end.")
    return tuple(stop)


def _whole(given: Mapping[str, Any], name: str, default: int, *, least: int) -> int:
    value = given.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise OptionError(f"{name} is {value!r}; it must be a whole number of at least {least}.")
    return value
