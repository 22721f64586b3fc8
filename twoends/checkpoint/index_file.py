"""model.safetensors.index.json, read in pieces: 60 MB of names never become Python objects at once."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from twoends.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"

_PIECE_BYTES = 1 << 20
# No name, and no metadata, is longer than this many characters.
_MAX_ITEM = 1 << 21
_HASH_MASK = (1 << 64) - 1
_STRING = r'"([^"\\]*(?:\\.[^"\\]*)*)"'
_PAIR = re.compile(rf"\s*{_STRING}\s*:\s*{_STRING}\s*([,}}])")
_KEY = re.compile(rf"\s*{_STRING}\s*:\s*(?=\S)")
_OPEN = re.compile(r"\s*\{")
_CLOSE = re.compile(r"\s*\}")
_AFTER = re.compile(r"\s*([,}])")


@dataclass(slots=True)
class NameSum:
    """How many names, and the sum of their 64-bit hashes: equal for equal sets in any order.

    Only comparable within one process, as Python's string hashes are.
    """

    count: int = 0
    hash_sum: int = 0

    def add(self, name: str) -> None:
        self.count += 1
        self.hash_sum = (self.hash_sum + hash(name)) & _HASH_MASK


@dataclass(slots=True, kw_only=True)
class IndexCensus:
    """What the index file says: the sum over all tensors, and each shard's names as a NameSum."""

    total_size: int | None
    shards: dict[str, NameSum] = field(default_factory=dict)


def read_census(path: Path) -> IndexCensus:
    """One pass over the index file. Raises CheckpointError if it isn't one."""
    shards: dict[str, NameSum] = {}

    def count(name: str, shard: str) -> None:
        known = shards.get(shard)
        if known is None:
            if "/" in shard or "\\" in shard or not shard.endswith(".safetensors"):
                raise _not_an_index(path, f"'{name}' is said to be in '{shard}', not a shard's name")
            known = shards[shard] = NameSum()
        known.add(name)

    metadata = read_weight_map(path, count)
    total = metadata.get("total_size")
    if total is not None and (type(total) not in (int, float) or total != int(total) or total < 0):
        raise _not_an_index(path, f"metadata.total_size is {total!r}")
    return IndexCensus(total_size=None if total is None else int(total), shards=shards)


def names_in_shard(path: Path, shard: str) -> list[str]:
    """The tensors that the index file puts into one shard, in its order."""
    names: list[str] = []

    def keep(name: str, where: str) -> None:
        if where == shard:
            names.append(name)

    read_weight_map(path, keep)
    return names


def read_weight_map(path: Path, pair: Callable[[str, str], None]) -> dict[str, Any]:
    """Calls pair(tensor, shard) for each entry of weight_map; returns the metadata."""
    try:
        return _Scanner(path).run(pair)
    except OSError as error:
        raise CheckpointError(
            f"{path.name} can't be read: {error.strerror}.", evidence=[("file", str(path))]
        ) from None


class _Scanner:
    """Walks the JSON text of one index file; holds one piece at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._pieces = self._read()
        self._text = ""
        self._at = 0

    def run(self, pair: Callable[[str, str], None]) -> dict[str, Any]:
        found: dict[str, dict[str, Any]] = {}
        self._take(_OPEN, "an opening brace")
        while True:
            key = self._word(self._take(_KEY, "'metadata' or 'weight_map'").group(1))
            if key in found or key not in ("metadata", "weight_map"):
                what = "appears twice" if key in found else "is not 'metadata' or 'weight_map'"
                raise _not_an_index(self._path, f"its field '{key}' {what}")
            found[key] = self._small_object() if key == "metadata" else self._pairs(pair)
            if self._take(_AFTER, "a comma or the end").group(1) == "}":
                break
        if self._rest().strip():
            raise _not_an_index(self._path, "something follows its end")
        if "weight_map" not in found:
            raise _not_an_index(self._path, "it has no 'weight_map'")
        return found.get("metadata", {})

    def _pairs(self, pair: Callable[[str, str], None]) -> dict[str, Any]:
        self._take(_OPEN, "weight_map's opening brace")
        if self._match(_CLOSE) is not None:
            return {}
        while True:
            # Half a million pairs: the scanner walks one piece without slicing it.
            escaped = "\\" in self._text
            for match in iter(_PAIR.scanner(self._text, self._at).match, None):  # type: ignore[attr-defined]
                name, shard, after = match.groups()
                pair(self._word(name) if escaped else name, self._word(shard) if escaped else shard)
                self._at = match.end()
                if after == "}":
                    return {}
            if len(self._text) - self._at > _MAX_ITEM or not self._more():
                raise self._unexpected("'tensor': 'shard'")

    def _small_object(self) -> dict[str, Any]:
        """The metadata: whole in the buffer, or the file is not an index."""
        while True:
            try:
                value, end = json.JSONDecoder().raw_decode(self._text, self._at)
                break
            except (ValueError, RecursionError) as error:
                if len(self._text) - self._at > _MAX_ITEM or not self._more():
                    raise _not_an_index(self._path, f"its metadata is not JSON ({error})") from None
        self._at = end
        if not isinstance(value, dict):
            raise _not_an_index(self._path, "its metadata is not an object")
        return value

    def _take(self, pattern: re.Pattern[str], expected: str) -> re.Match[str]:
        match = self._match(pattern)
        while match is None:
            if len(self._text) - self._at > _MAX_ITEM or not self._more():
                raise self._unexpected(expected)
            match = self._match(pattern)
        return match

    def _unexpected(self, expected: str) -> CheckpointError:
        near = self._text[self._at : self._at + 40]
        what = "it ends" if not near.strip() else f"{near!r} stands"
        return _not_an_index(self._path, f"{what} where {expected} should be")

    def _match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        match = pattern.match(self._text, self._at)
        if match is not None:
            self._at = match.end()
        return match

    def _more(self) -> bool:
        piece = next(self._pieces, None)
        if piece is None:
            return False
        self._text = self._text[self._at :] + piece
        self._at = 0
        return True

    def _rest(self) -> str:
        rest = self._text[self._at :]
        return rest if rest.strip() else "".join([rest, next(self._pieces, "")])

    def _read(self) -> Iterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8")()
        try:
            with self._path.open("rb") as file:
                while data := file.read(_PIECE_BYTES):
                    yield decoder.decode(data)
            yield decoder.decode(b"", final=True)
        except UnicodeDecodeError as error:
            raise _not_an_index(self._path, f"it is not text ({error.reason})") from None

    def _word(self, raw: str) -> str:
        """A JSON string's text; escapes are rare, so they are looked for first."""
        if "\\" not in raw:
            return raw
        try:
            return str(json.loads(f'"{raw}"'))
        except ValueError as error:
            raise _not_an_index(self._path, f"'{raw:.60}' is not a JSON string ({error})") from None


def _not_an_index(path: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"{path.name} is not a sound index: {what}.",
        evidence=[("file", str(path)), ("expected", "{metadata, weight_map: {tensor: shard}}")],
        remedies=[f"Fetch {path.name} again."],
    )
