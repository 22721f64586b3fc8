"""tiktoken.model and tokenizer_config.json of a checkpoint, read and checked; nothing is repaired.

The rank file has one `base64(token bytes) rank` a line; tokenizer_config.json names the special tokens
that follow the ranks (spec: kimi-k3, section 8.4).
"""

from __future__ import annotations

import binascii
import difflib
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from twoends.checkpoint.config import read_json_object
from twoends.errors import ConfigError, TokenizerError

RANK_FILE = "tiktoken.model"
CONFIG_FILE = "tokenizer_config.json"

_MAX_RANK_FILE_BYTES = 64 << 20
_TOKENIZER_CLASS = "TikTokenTokenizer"
_NAMED_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
# Fields that say nothing about ids or text here; every other field is either checked or refused.
_WITHOUT_EFFECT = ("auto_map", "chat_template", "model_max_length", "padding_side", "truncation_side")
_CHECKED = (
    "added_tokens_decoder",
    "additional_special_tokens",
    "clean_up_tokenization_spaces",
    "extra_special_tokens",
    "tokenizer_class",
    *_NAMED_TOKENS,
)
_REQUIRED = ("added_tokens_decoder", "eos_token", "tokenizer_class")
_NOT_DONE_HERE = ("lstrip", "normalized", "rstrip", "single_word")


@dataclass(frozen=True, slots=True, kw_only=True)
class Specials:
    """The special slots: ids from the number of ranks up to the vocabulary size, each with a name."""

    ids: dict[str, int]
    skipped: frozenset[int]
    eos_id: int


def fault(headline: str, *, path: Path, expected: str, found: str) -> TokenizerError:
    """A tokenizer file that is wrong, with the file and the two values that clash."""
    return TokenizerError(
        headline,
        evidence=[("file", str(path)), ("expected", expected), ("found", found)],
        remedies=["If the file was edited or cut short, fetch it again; it belongs to the checkpoint."],
    )


def read_ranks(path: Path) -> dict[bytes, int]:
    """Token bytes -> rank, ranks 0..n-1, every single byte among them. Raises TokenizerError."""
    ranks: dict[bytes, int] = {}
    try:
        size = path.stat().st_size
        if size > _MAX_RANK_FILE_BYTES:
            raise fault(
                f"{path.name} is too large to be a rank file.",
                path=path,
                expected=f"at most {_MAX_RANK_FILE_BYTES:,} bytes",
                found=f"{size:,} bytes",
            )
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                token, rank = _parse_line(line.removesuffix(b"\n"), path=path, number=number)
                if token in ranks:
                    raise fault(
                        f"Line {number:,} of {path.name} repeats a token.",
                        path=path,
                        expected="every token once",
                        found=f"{token!r} with ranks {ranks[token]:,} and {rank:,}",
                    )
                ranks[token] = rank
    except FileNotFoundError:
        raise fault(
            f"There is no {path.name} in {path.parent}.",
            path=path,
            expected="the checkpoint's rank file",
            found="nothing",
        ) from None
    except OSError as error:
        raise TokenizerError(
            f"{path.name} can't be read: {error.strerror}.", evidence=[("file", str(path))]
        ) from None
    _check_ranks(ranks, path=path)
    return ranks


def _parse_line(line: bytes, *, path: Path, number: int) -> tuple[bytes, int]:
    encoded, _, digits = line.partition(b" ")
    # int() would also take signs, underscores and blanks
    if not digits.isdigit() or len(digits) > 9:
        raise fault(
            f"Line {number:,} of {path.name} is not a token and its rank.",
            path=path,
            expected="base64, one blank, a decimal rank",
            found=repr(line[:60]),
        )
    try:
        token = binascii.a2b_base64(encoded, strict_mode=True)
    except binascii.Error as error:
        raise fault(
            f"Line {number:,} of {path.name} has a token that is not base64: {error}.",
            path=path,
            expected="base64 of the token's bytes",
            found=repr(encoded[:60]),
        ) from None
    if not token:
        raise fault(
            f"Line {number:,} of {path.name} has an empty token.",
            path=path,
            expected="at least one byte",
            found=repr(line[:60]),
        )
    return token, int(digits)


def _check_ranks(ranks: Mapping[bytes, int], *, path: Path) -> None:
    """Ranks must be 0..n-1, each once, and every single byte must have one."""
    count = len(ranks)
    times = np.bincount(np.fromiter(ranks.values(), dtype=np.int64, count=count).clip(max=count))
    wrong = np.flatnonzero(times[:count] != 1)
    if len(wrong) or len(times) < count:
        first = int(wrong[0]) if len(wrong) else len(times)
        held = [token for token, rank in ranks.items() if rank == first]
        raise fault(
            f"The ranks in {path.name} are not dense.",
            path=path,
            expected=f"each of 0..{count - 1:,} once",
            found=f"rank {first:,} " + (f"for {held[0]!r} and {held[1]!r}" if held else "nowhere"),
        )
    missing = [value for value in range(256) if bytes([value]) not in ranks]
    if missing:
        raise fault(
            f"{path.name} can't encode every text: {len(missing)} of the 256 single bytes have no rank.",
            path=path,
            expected="a rank for each of the 256 single bytes",
            found="none for " + ", ".join(f"0x{value:02x}" for value in missing[:8]),
        )


def read_specials(path: Path, *, num_ranks: int, vocab_size: int) -> Specials:
    """The special slots that follow `num_ranks` ranks. Raises TokenizerError."""
    try:
        raw = read_json_object(path)
    except ConfigError as error:
        raise TokenizerError(error.headline, evidence=error.evidence, remedies=error.remedies) from None
    _check_fields(raw, path=path)
    named = _named_specials(
        raw["added_tokens_decoder"], num_ranks=num_ranks, vocab_size=vocab_size, path=path
    )
    names = {token_id: name for token_id, (name, _) in named.items()}
    ids: dict[str, int] = {}
    for token_id in range(num_ranks, vocab_size):
        name = names.get(token_id, f"<|reserved_token_{token_id}|>")
        if name in ids:
            raise fault(
                f"{path.name} gives one name to two special tokens.",
                path=path,
                expected="a name of its own for each id",
                found=f"{name!r} for {ids[name]:,} and {token_id:,}",
            )
        ids[name] = token_id
    _check_prefixes(ids, path=path)
    _check_references(raw, ids, path=path)
    skipped = frozenset(token_id for token_id, (_, special) in named.items() if special)
    return Specials(ids=ids, skipped=skipped, eos_id=ids[raw["eos_token"]])


def _check_fields(raw: Mapping[str, Any], *, path: Path) -> None:
    known = (*_CHECKED, *_WITHOUT_EFFECT)
    for name in raw:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
            raise fault(
                f"'{name}' in {path.name} is not known, so what it asks for would not be done.",
                path=path,
                expected=f"only known fields; the nearest is '{near[0]}'",
                found=f"'{name}': {raw[name]!r}"[:120],
            )
    for name in _REQUIRED:
        if name not in raw:
            raise fault(
                f"{path.name} lacks '{name}'.",
                path=path,
                expected=f"the field '{name}'",
                found="no such field",
            )
    wanted = {
        "tokenizer_class": (_TOKENIZER_CLASS,),
        "clean_up_tokenization_spaces": (False,),
        "extra_special_tokens": ({}, []),
    }
    for name, values in wanted.items():
        if name in raw and not any(raw[name] is value or raw[name] == value for value in values):
            raise fault(
                f"'{name}' in {path.name} asks for something that Twoends doesn't do.",
                path=path,
                expected=repr(values[0]),
                found=repr(raw[name])[:120],
            )


def _named_specials(
    added: Any, *, num_ranks: int, vocab_size: int, path: Path
) -> dict[int, tuple[str, bool]]:
    """id -> (name, whether decoding for a reader leaves it out)."""
    if not isinstance(added, dict):
        raise fault(
            f"'added_tokens_decoder' in {path.name} is not an object.",
            path=path,
            expected="an object from id to token",
            found=type(added).__name__,
        )
    named: dict[int, tuple[str, bool]] = {}
    for key, entry in added.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10 and str(int(key)) == key):
            raise fault(
                f"'added_tokens_decoder' in {path.name} has a key that is not an id.",
                path=path,
                expected="a decimal id",
                found=repr(key),
            )
        token_id = int(key)
        if token_id < num_ranks:
            raise fault(
                f"Special token {token_id:,} in {path.name} is also a rank.",
                path=path,
                expected=f"ids from {num_ranks:,}, the number of ranks in {RANK_FILE}",
                found=f"{token_id:,}",
            )
        if token_id >= vocab_size:
            raise fault(
                f"Special token {token_id:,} in {path.name} is beyond the model's vocabulary.",
                path=path,
                expected=f"ids below vocab_size {vocab_size:,}",
                found=f"{token_id:,}",
            )
        named[token_id] = _parse_added_token(entry, token_id=token_id, path=path)
    return named


def _parse_added_token(entry: Any, *, token_id: int, path: Path) -> tuple[str, bool]:
    fields = {"content": str, "special": bool, **dict.fromkeys(_NOT_DONE_HERE, bool)}
    if not isinstance(entry, dict) or set(entry) != set(fields):
        odd = set(entry) ^ set(fields) if isinstance(entry, dict) else set()
        raise fault(
            f"Special token {token_id:,} in {path.name} has unknown or missing fields.",
            path=path,
            expected=", ".join(sorted(fields)),
            found=", ".join(
                f"'{name}' " + ("missing" if name in fields else "unknown") for name in sorted(odd)
            )
            or type(entry).__name__,
        )
    for name, kind in fields.items():
        value = entry[name]
        if not isinstance(value, kind) or value == "" or (name in _NOT_DONE_HERE and value):
            raise fault(
                f"'{name}' of special token {token_id:,} in {path.name} can't be used.",
                path=path,
                expected={"content": "a name", "special": "true or false"}.get(name, "false"),
                found=repr(value)[:120],
            )
    return entry["content"], entry["special"]


def _check_prefixes(ids: Mapping[str, int], *, path: Path) -> None:
    """No name may begin with another: which of the two a text means would be left to chance."""
    ordered = sorted(ids)
    for name, following in itertools.pairwise(ordered):
        if following.startswith(name):
            raise fault(
                f"{path.name} has a special token whose name begins with another's.",
                path=path,
                expected="names of which none begins with another",
                found=f"{name!r} and {following!r}",
            )


def _check_references(raw: Mapping[str, Any], ids: Mapping[str, int], *, path: Path) -> None:
    """bos, eos, pad, unk and the additional tokens must name special tokens."""
    additional = raw.get("additional_special_tokens", [])
    if not isinstance(additional, list):
        raise fault(
            f"'additional_special_tokens' in {path.name} is not a list.",
            path=path,
            expected="a list of names",
            found=type(additional).__name__,
        )
    given = [("additional_special_tokens", name) for name in additional]
    given += [
        (field, raw[field]) for field in _NAMED_TOKENS if field == "eos_token" or raw.get(field) is not None
    ]
    for field, name in given:
        if not isinstance(name, str) or name not in ids:
            raise fault(
                f"'{field}' in {path.name} names no special token.",
                path=path,
                expected="a name from 'added_tokens_decoder'",
                found=repr(name)[:120],
            )
