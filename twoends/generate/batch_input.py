"""The input of a batch: a file of one JSON object a line, in OpenAI's batch format.

The file is read once to see that it is whole, and its lines again when their turn comes: what is kept
of it is where each line begins and what it is called.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twoends.errors import OptionError

_MAX_LINE_BYTES = 1 << 24
_FIELDS = ("custom_id", "method", "url", "body")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLine:
    """One line: its place in the file (the first is 1) and what it says."""

    number: int
    custom_id: str
    fields: dict[str, Any]

    def body(self, url: str) -> object:
        """The body of a POST to `url`. Raises OptionError for any other request."""
        unknown = [name for name in self.fields if name not in _FIELDS]
        if unknown:
            raise OptionError(f"the line has a field '{unknown[0]}'; known are {', '.join(_FIELDS)}.")
        if self.fields.get("method") != "POST":
            raise OptionError(f"method is {self.fields.get('method')!r}; it must be 'POST'.")
        if self.fields.get("url") != url:
            raise OptionError(f"url is {self.fields.get('url')!r}; only '{url}' is served here.")
        return self.fields.get("body")


class BatchInput:
    """A file whose every line is an object with a custom_id of its own; `digest` is that of its bytes."""

    def __init__(self, path: Path) -> None:
        """Reads the whole file. Raises OptionError, with the number of the line, for a broken one."""
        self.path = path
        self._begins = array("Q")
        self._numbers = array("Q")
        self._index: dict[str, int] = {}
        digest = hashlib.blake2b(digest_size=16)
        at = 0
        try:
            with path.open("rb") as file:
                for number, raw in enumerate(_lines(path, file), 1):
                    digest.update(raw)
                    if raw.strip():
                        self._add(_parse(path, number, raw), at)
                    at += len(raw)
        except OSError as error:
            raise OptionError(f"{path} can't be read: {error.strerror}.") from error
        if not self._begins:
            raise OptionError(f"{path} has no request.")
        self.digest = digest.hexdigest()

    def __len__(self) -> int:
        return len(self._begins)

    def index_of(self, custom_id: str) -> int | None:
        """Which request, counted from 0, has this custom_id."""
        return self._index.get(custom_id)

    def lines(self, wanted: Iterator[int]) -> Iterator[BatchLine]:
        """The requests with these indices, read when they are asked for."""
        with self.path.open("rb") as file:
            for index in wanted:
                file.seek(self._begins[index])
                line = _parse(self.path, self._numbers[index], file.readline(_MAX_LINE_BYTES + 1))
                if self._index.get(line.custom_id) != index:
                    raise OptionError(f"{self.path} was changed while it was being worked on.")
                yield line

    def _add(self, line: BatchLine, at: int) -> None:
        earlier = self._index.setdefault(line.custom_id, len(self._begins))
        if earlier != len(self._begins):
            raise OptionError(
                f"line {line.number} of {self.path} has the custom_id of line {self._numbers[earlier]}: "
                f"{line.custom_id!r}.",
                remedies=["Give every request a custom_id of its own: answers are found by it."],
            )
        self._begins.append(at)
        self._numbers.append(line.number)


def _lines(path: Path, file: Any) -> Iterator[bytes]:
    number = 0
    while raw := file.readline(_MAX_LINE_BYTES + 1):
        number += 1
        if len(raw) > _MAX_LINE_BYTES:
            raise OptionError(f"line {number} of {path} is longer than {_MAX_LINE_BYTES >> 20} MiB.")
        yield raw


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; of two values under one name, one would be lost."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the name {twice!r} is there twice")
    return found


def _parse(path: Path, number: int, raw: bytes) -> BatchLine:
    try:
        found = json.loads(raw, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        raise OptionError(
            f"line {number} of {path} is not JSON: {reason}.",
            remedies=["Nothing was done. Each line must be one whole JSON object."],
        ) from None
    if not isinstance(found, dict):
        raise OptionError(f"line {number} of {path} is not a JSON object.")
    custom_id = found.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        raise OptionError(
            f"line {number} of {path} has no custom_id.",
            remedies=['Name the request:  "custom_id": "..."; its answer is found by it.'],
        )
    return BatchLine(number=number, custom_id=custom_id, fields=found)
