"""How fast a disk reads: measured by `doctor` on a file of its own, kept for `plan`'s estimate."""

from __future__ import annotations

import dataclasses
import datetime
import json
import mmap
import os
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twoends.checkpoint.index_cache import cache_directory
from twoends.engine.files import WeightFiles
from twoends.engine.reader import DEPTH, PIECE_BYTES
from twoends.errors import DoesNotFit
from twoends.units import format_bytes

MB = 2**20
FILE_BYTES = 256 * MB
_WRITE_BYTES = 4 * MB
_FREE_RESERVE = 64 * MB
_TRIAL_S = 0.4


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskRate:
    """The engine's own way of reading (4 MiB pieces, four in flight) on one file system."""

    bytes_per_s: float
    date: str
    is_direct: bool

    def seconds(self, num_bytes: int) -> float:
        """How long `num_bytes` take."""
        return num_bytes / self.bytes_per_s

    def as_object(self) -> dict[str, Any]:
        """For --json."""
        return dataclasses.asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One way of reading, and what it gave."""

    block_bytes: int
    depth: int
    bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskReport:
    """What `doctor` learnt of one directory's disk."""

    directory: Path
    reason: str
    is_direct: bool
    trials: tuple[Trial, ...]

    @property
    def engine(self) -> Trial:
        """The trial that reads as the engine does."""
        return next(t for t in self.trials if (t.block_bytes, t.depth) == (PIECE_BYTES, DEPTH))

    @property
    def best(self) -> Trial:
        """The fastest trial."""
        return max(self.trials, key=lambda trial: trial.bytes_per_s)


def measure_disk(directory: Path, *, file_bytes: int = FILE_BYTES) -> DiskReport:
    """Writes a temporary file into `directory` and reads it in several ways. Raises DoesNotFit."""
    stats = os.statvfs(directory)
    free = stats.f_bavail * stats.f_frsize
    if free < file_bytes + _FREE_RESERVE:
        raise DoesNotFit(
            f"measuring the disk needs {format_bytes(file_bytes + _FREE_RESERVE)}; "
            f"{format_bytes(free)} are free.",
            evidence=[("directory", str(directory))],
            remedies=["Name another directory:  twoends doctor --disk DIR"],
        )
    with tempfile.NamedTemporaryFile(dir=directory, prefix=".twoends-doctor-") as file:
        block = os.urandom(_WRITE_BYTES)
        for _ in range(file_bytes // _WRITE_BYTES):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        files = WeightFiles([Path(file.name)])
        try:
            trials = tuple(
                _trial(files, file_bytes, block_bytes=block_bytes, depth=depth)
                for block_bytes, depth in ((MB, 1), (MB, DEPTH), (PIECE_BYTES, DEPTH), (PIECE_BYTES, 8))
            )
            return DiskReport(directory=directory, reason=files.reason, is_direct=files.direct, trials=trials)
        finally:
            files.close()


def keep_rate(report: DiskReport) -> DiskRate:
    """Stores the engine's rate under the directory's device; a cache that can't be written is no error."""
    rate = DiskRate(
        bytes_per_s=report.engine.bytes_per_s,
        date=datetime.date.today().isoformat(),
        is_direct=report.is_direct,
    )
    known = _read_rates() | {_device(report.directory): rate.as_object()}
    try:
        _place().parent.mkdir(parents=True, exist_ok=True)
        temporary = _place().with_suffix(f".{os.getpid()}.part")
        temporary.write_text(json.dumps(known, indent=1))
        temporary.replace(_place())
    except OSError:
        return rate
    return rate


def rate_under(directory: Path) -> DiskRate | None:
    """The kept rate of the disk that holds `directory`."""
    kept = _read_rates().get(_device(directory))
    return None if kept is None else DiskRate(**kept)


def _trial(files: WeightFiles, file_bytes: int, *, block_bytes: int, depth: int) -> Trial:
    """Threads that read disjoint blocks, round and round, until the time is over."""
    blocks = file_bytes // block_bytes
    began = time.perf_counter()
    done = [0] * depth

    def work(worker: int) -> None:
        buffer = memoryview(mmap.mmap(-1, block_bytes))
        at = worker
        while time.perf_counter() - began < _TRIAL_S:
            done[worker] += files.read_at(0, buffer, at % blocks * block_bytes)
            at += depth

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(depth)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return Trial(block_bytes=block_bytes, depth=depth, bytes_per_s=sum(done) / (time.perf_counter() - began))


def _read_rates() -> dict[str, Any]:
    try:
        found = json.loads(_place().read_text())
    except (OSError, ValueError):
        # Nothing was measured yet, or the file is damaged: plan then says that the rate is not known.
        return {}
    fields = {field.name for field in dataclasses.fields(DiskRate)}
    return {key: value for key, value in found.items() if isinstance(value, dict) and set(value) == fields}


def _place() -> Path:
    return cache_directory().parent / "disks.json"


def _device(directory: Path) -> str:
    return str(os.stat(directory).st_dev)
