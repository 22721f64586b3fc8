"""How fast this machine multiplies: measured by `doctor`, kept in the user's cache, used by every estimate.

Three figures explain a pass that reads nothing: bytes of BF16 trunk and of MXFP4 experts that go through
the kernels per second, one row at a time and all threads at work, and what a layer costs whatever its size.
A fourth belongs to the disk: what passes read from it while they multiply, which is less than what it gives
to a program that only reads, since both want the same cores and the same memory.
"""

from __future__ import annotations

import dataclasses
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twoends.checkpoint.index_cache import cache_directory
from twoends.engine.kept import keep, read_kept


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeRate:
    """What `doctor` measured with one choice of kernels and threads, and on one device."""

    isa: str
    threads: int
    bf16_bytes_per_s: float
    mxfp4_bytes_per_s: float
    layer_s: float
    reading_bytes_per_s: float
    date: str

    def as_object(self) -> dict[str, Any]:
        """For --json and for the file."""
        return dataclasses.asdict(self)


def keep_compute(directory: Path, rate: ComputeRate) -> None:
    """Stores the rate under its kernels, threads and device; a cache that can't be written is no error."""
    keep(_place(), _key(directory, rate.isa, rate.threads), rate.as_object(), is_sound=_is_sound)


def kept_compute(directory: Path, *, isa: str | None, threads: int) -> ComputeRate | None:
    """What was kept for these kernels, threads and the disk of `directory`; None for nothing sound."""
    kept = read_kept(_place(), is_sound=_is_sound).get(_key(directory, isa or "reference", threads))
    return None if kept is None else ComputeRate(**kept)


def _is_sound(value: Any) -> bool:
    fields = {field.name: field.type for field in dataclasses.fields(ComputeRate)}
    if not isinstance(value, dict) or set(value) != set(fields):
        return False
    texts = all(isinstance(value[name], str) for name in ("isa", "date"))
    numbers = [value[name] for name, kind in fields.items() if kind in ("float", "int")]
    real = all(isinstance(n, int | float) and not isinstance(n, bool) and math.isfinite(n) for n in numbers)
    return (
        texts
        and real
        and all(n >= 0 for n in numbers)
        and min(value["bf16_bytes_per_s"], value["mxfp4_bytes_per_s"], value["reading_bytes_per_s"]) > 0
    )


def _key(directory: Path, isa: str, threads: int) -> str:
    return f"{isa}, {threads} threads, device {os.stat(directory).st_dev}"


def _place() -> Path:
    return cache_directory().parent / "compute.json"
