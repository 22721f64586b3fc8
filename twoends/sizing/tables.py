"""Tables of facts in TOML files: read whole, every key known, every entry with its source and date."""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from twoends.errors import OptionError

_MAX_FILE_BYTES = 4 << 20
_ASSETS = Path(__file__).parents[1] / "assets" / "sizing"


def asset(name: str) -> Path:
    """A file that comes with the package."""
    return _ASSETS / name


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of one file. Raises OptionError for one that is not there or not TOML."""
    rows = [("file", str(path))]
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise OptionError(f"{path.name} has more than {_MAX_FILE_BYTES:,} bytes.", evidence=rows)
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionError(f"{path.name} can't be read: {error.strerror}.", evidence=rows) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise OptionError(f"{path.name} is not valid TOML: {error}.", evidence=rows) from None


class Entry:
    """One table of a file: gives its fields by name and type, and refuses what nobody asked for."""

    def __init__(self, raw: Any, *, path: Path, place: str) -> None:
        self._path, self._place = path, place
        if not isinstance(raw, Mapping):
            raise self.wrong("must be a table")
        self._raw, self._asked = raw, set[str]()

    def text(self, key: str, *, default: str | None = None) -> str:
        """A text that is not empty."""
        value = self._get(key, default)
        if not isinstance(value, str) or (not value and default is None):
            raise self.wrong(f"'{key}' must be a text, not {value!r}")
        return value

    def number(self, key: str, *, default: float | None = None, least: float = 0.0) -> float:
        """A finite number above zero (or of at least `least`, where that is above zero)."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.wrong(f"'{key}' must be a number, not {value!r}")
        if value <= 0 or value < least:
            raise self.wrong(f"'{key}' is {value}; it must be above {least or 'zero'}")
        return float(value)

    def whole(self, key: str, *, default: int | None = None) -> int:
        """A whole number above zero."""
        value = self.number(key, default=default)
        if value != int(value):
            raise self.wrong(f"'{key}' must be a whole number, not {value}")
        return int(value)

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of texts."""
        value = self._get(key, None)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.wrong(f"'{key}' must be a list of texts")
        return tuple(value)

    def numbers(self, key: str) -> tuple[float, ...]:
        """A list of numbers."""
        value = self._get(key, None)
        if not isinstance(value, list) or not all(isinstance(item, int | float) for item in value):
            raise self.wrong(f"'{key}' must be a list of numbers")
        return tuple(float(item) for item in value)

    def has(self, key: str) -> bool:
        """Whether the field is there."""
        return key in self._raw

    def origin(self) -> str:
        """ "source (date)": both are demanded."""
        date = self._raw.get("date", "")
        self._asked.add("date")
        if not date:
            raise self.wrong("'date' is missing: a figure without one can't be judged")
        return f"{self.text('source')} ({date})"

    def done(self) -> None:
        """Raises OptionError for a field that nobody asked for."""
        for key in self._raw:
            if key not in self._asked:
                near = nearest(key, sorted(self._asked))
                raise self.wrong(f"'{key}' is no field of it; nearest known name: {near}")

    def wrong(self, fault: str) -> OptionError:
        """The error for this entry."""
        return OptionError(
            f"{self._path.name}: {fault}.", evidence=[("file", str(self._path)), ("entry", self._place)]
        )

    def _get(self, key: str, default: Any) -> Any:
        self._asked.add(key)
        if key in self._raw:
            return self._raw[key]
        if default is None:
            raise self.wrong(f"'{key}' is missing")
        return default


def entries(tables: Mapping[str, Any], key: str, *, path: Path) -> list[Entry]:
    """The array of tables `[[key]]` of a file, empty where there is none."""
    found = tables.get(key, [])
    if not isinstance(found, list):
        raise OptionError(f"{path.name}: '{key}' must be an array of tables, [[{key}]].")
    return [Entry(raw, path=path, place=f"{key} {i + 1}") for i, raw in enumerate(found)]


def check_keys(tables: Mapping[str, Any], known: Sequence[str], *, path: Path) -> None:
    """Raises OptionError for a table that means nothing."""
    for key in tables:
        if key not in known:
            raise OptionError(
                f"{path.name} has no use for '{key}'.",
                evidence=[("file", str(path)), ("nearest known name", nearest(key, known))],
            )


def nearest(word: str, known: Sequence[str]) -> str:
    """The known name that looks most like `word`, upper and lower case being the same."""
    lowered = {name.lower(): name for name in known}
    return lowered[difflib.get_close_matches(word.lower(), list(lowered), n=1, cutoff=0.0)[0]]
