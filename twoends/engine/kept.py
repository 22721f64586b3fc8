"""Measurements that are kept in the user's cache: one JSON object a file, a measurement under each key."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


def keep(place: Path, key: str, value: dict[str, Any], *, is_sound: Callable[[Any], bool]) -> None:
    """Stores one measurement beside the others; a cache that can't be written is no error."""
    known = read_kept(place, is_sound=is_sound) | {key: value}
    with contextlib.suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        temporary = place.with_suffix(f".{os.getpid()}.part")
        temporary.write_text(json.dumps(known, indent=1))
        temporary.replace(place)


def read_kept(place: Path, *, is_sound: Callable[[Any], bool]) -> dict[str, Any]:
    """What was kept and is sound; nothing where nothing was measured yet, or the file is damaged."""
    try:
        found = json.loads(place.read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {key: value for key, value in found.items() if is_sound(value)}
