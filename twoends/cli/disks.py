"""How to read a disk fastest, and how fast that is: measured by `doctor` on a file of its own."""

from __future__ import annotations

import datetime
import os
import statistics
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from twoends.engine.arena import Arena
from twoends.engine.device import DiskRate, keep_rate
from twoends.engine.files import WeightFiles
from twoends.engine.reader import DEPTH, PIECE_BYTES
from twoends.errors import DoesNotFit
from twoends.units import format_bytes

MB = 2**20
FILE_BYTES = 256 * MB
_WRITE_BYTES = 4 * MB
_FREE_RESERVE = 64 * MB
_TRIAL_S = 0.25
# Shared disks change their speed within seconds: every way is tried in every round, the median counts.
_ROUNDS = 3
_PIECES = (MB, 2 * MB, PIECE_BYTES, 8 * MB)
_DEPTHS = (2, DEPTH, 8)
# The engine's usual way is kept unless another is clearly faster: a file that was just written may be read from
# a cache below us, where small pieces look as good as large ones.
_CLEARLY = 1.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One way of reading, and the median of what it gave."""

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
    def usual(self) -> Trial:
        """The way in which the engine reads a device that it knows nothing of."""
        return next(t for t in self.trials if (t.block_bytes, t.depth) == (PIECE_BYTES, DEPTH))

    @property
    def engine(self) -> Trial:
        """The way in which the engine will read this device: the usual one, or one that is clearly faster."""
        best = max(self.trials, key=lambda trial: trial.bytes_per_s)
        return best if best.bytes_per_s > _CLEARLY * self.usual.bytes_per_s else self.usual


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
            return DiskReport(
                directory=directory,
                reason=files.reason,
                is_direct=files.direct,
                trials=_trials(files, file_bytes),
            )
        finally:
            files.close()


def keep_report(report: DiskReport) -> DiskRate:
    """Stores the way the engine will read, under the directory's device."""
    rate = DiskRate(
        bytes_per_s=report.engine.bytes_per_s,
        date=datetime.date.today().isoformat(),
        is_direct=report.is_direct,
        piece_bytes=report.engine.block_bytes,
        depth=report.engine.depth,
    )
    keep_rate(report.directory, rate)
    return rate


def _trials(files: WeightFiles, file_bytes: int) -> tuple[Trial, ...]:
    ways = [(piece, depth) for piece in _PIECES for depth in _DEPTHS]
    # Touched before any clock runs: the first use of a page costs more than reading it.
    room = Arena(max(_PIECES) * max(_DEPTHS))
    rates: dict[tuple[int, int], list[float]] = {way: [] for way in ways}
    for _ in range(_ROUNDS):
        for piece, depth in ways:
            rates[piece, depth].append(_bytes_per_s(files, file_bytes, room, block_bytes=piece, depth=depth))
    return tuple(
        Trial(block_bytes=piece, depth=depth, bytes_per_s=statistics.median(rates[piece, depth]))
        for piece, depth in ways
    )


def _bytes_per_s(files: WeightFiles, file_bytes: int, room: Arena, *, block_bytes: int, depth: int) -> float:
    """Threads that read disjoint blocks, round and round, until the time is over."""
    blocks = file_bytes // block_bytes
    began = time.perf_counter()
    done = [0] * depth

    def work(worker: int) -> None:
        buffer = room.view(worker * block_bytes, block_bytes)
        at = worker
        while not done[worker] or time.perf_counter() - began < _TRIAL_S:
            done[worker] += files.read_at(0, buffer, at % blocks * block_bytes)
            at += depth

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(depth)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(done) / (time.perf_counter() - began)
