"""What `doctor` measured of a device, kept in the user's cache: the best way to read it, and its rate."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twoends.checkpoint.index_cache import cache_directory
from twoends.engine.arena import PAGE
from twoends.engine.kept import keep, read_kept
from twoends.engine.reader import ReadShape

# More threads or larger pieces than these were never measured to help; a damaged file must not ask for them.
MAX_DEPTH = 64
MAX_PIECE_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskRate:
    """The fastest measured way of reading one file system, and what it gave."""

    bytes_per_s: float
    date: str
    is_direct: bool
    piece_bytes: int
    depth: int

    @property
    def shape(self) -> ReadShape:
        """How the engine is to read it."""
        return ReadShape(piece_bytes=self.piece_bytes, depth=self.depth)

    def seconds(self, num_bytes: int) -> float:
        """How long `num_bytes` take."""
        return num_bytes / self.bytes_per_s

    def as_object(self) -> dict[str, Any]:
        """For --json and for the file."""
        return dataclasses.asdict(self)


def keep_rate(directory: Path, rate: DiskRate) -> None:
    """Stores the rate under the directory's device; a cache that can't be written is no error."""
    keep(_place(), _device(directory), rate.as_object(), is_sound=_is_sound)


def rate_under(directory: Path) -> DiskRate | None:
    """The kept rate of the disk that holds `directory`; None where nothing sound was kept."""
    kept = read_kept(_place(), is_sound=_is_sound).get(_device(directory))
    return None if kept is None else DiskRate(**kept)


def shape_under(directory: Path) -> ReadShape:
    """How to read the disk that holds `directory`: as measured, else the defaults."""
    rate = rate_under(directory)
    return ReadShape() if rate is None else rate.shape


def _is_sound(value: Any) -> bool:
    """Whether a kept rate has this version's fields and sizes that a reader can take."""
    fields = {field.name for field in dataclasses.fields(DiskRate)}
    if not isinstance(value, dict) or set(value) != fields:
        return False
    piece, depth, rate = value["piece_bytes"], value["depth"], value["bytes_per_s"]
    if not (isinstance(piece, int) and isinstance(depth, int) and isinstance(rate, int | float)):
        return False
    return 0 < piece <= MAX_PIECE_BYTES and piece % PAGE == 0 and 0 < depth <= MAX_DEPTH and rate > 0


def _place() -> Path:
    return cache_directory().parent / "disks.json"


def _device(directory: Path) -> str:
    return str(os.stat(directory).st_dev)
