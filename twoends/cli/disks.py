"""How to read a disk fastest, and how fast that is: measured by `doctor` on a checkpoint's own weights.

A directory without weights gets a file that is written for the measurement. It flatters: what was just
written may come from a cache below this system.
"""

from __future__ import annotations

import datetime
import itertools
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
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
JUST_WRITTEN = "a file just written"
_TRIAL_S = 0.25
# Shared disks change their speed within seconds: every way is tried in every round, the median counts.
_ROUNDS = 3
_PIECES = (MB, 2 * MB, PIECE_BYTES, 8 * MB)
_DEPTHS = (2, DEPTH, 8)
# The engine's usual way is kept unless another is clearly faster: rates of a moment differ by more than ways.
_CLEARLY = 1.25
_WEIGHT_SUFFIXES = (".safetensors", ".pack")


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
    what: str
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
    """Reads the weights in `directory` in several ways, or a temporary file where it has none.

    Fewer weights than `file_bytes` count as none: read again and again, a small file stays in caches.
    Raises DoesNotFit where there is no room for the temporary file.
    """
    weights = _weights(directory)
    if sum(path.stat().st_size for path in weights) >= file_bytes:
        return _read_in_ways(directory, weights, what=f"{len(weights)} weight files")
    _refuse_full_disk(directory, file_bytes)
    with tempfile.NamedTemporaryFile(dir=directory, prefix=".twoends-doctor-") as file:
        block = os.urandom(_WRITE_BYTES)
        for _ in range(file_bytes // _WRITE_BYTES):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return _read_in_ways(directory, [Path(file.name)], what=JUST_WRITTEN)


def _weights(directory: Path) -> list[Path]:
    """Files of weights that lie in a directory itself and hold the largest piece."""
    found = (path for path in directory.iterdir() if path.suffix in _WEIGHT_SUFFIXES and path.is_file())
    return sorted(path for path in found if path.stat().st_size >= max(_PIECES))


def _refuse_full_disk(directory: Path, file_bytes: int) -> None:
    stats = os.statvfs(directory)
    free = stats.f_bavail * stats.f_frsize
    if free < file_bytes + _FREE_RESERVE:
        raise DoesNotFit(
            f"measuring the disk needs {format_bytes(file_bytes + _FREE_RESERVE)}; "
            f"{format_bytes(free)} are free.",
            evidence=[("directory", str(directory))],
            remedies=["Name the directory of a checkpoint, or another:  twoends doctor --disk DIR"],
        )


def _read_in_ways(directory: Path, paths: list[Path], *, what: str) -> DiskReport:
    files = WeightFiles(paths)
    try:
        return DiskReport(
            directory=directory,
            what=what,
            reason=files.reason,
            is_direct=files.direct,
            trials=_trials(files),
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


def _trials(files: WeightFiles) -> tuple[Trial, ...]:
    ways = [(piece, depth) for piece in _PIECES for depth in _DEPTHS]
    # Touched before any clock runs: the first use of a page costs more than reading it.
    room = Arena(max(_PIECES) * max(_DEPTHS))
    walks = {piece: _walk(files, piece) for piece in _PIECES}
    rates: dict[tuple[int, int], list[float]] = {way: [] for way in ways}
    for _ in range(_ROUNDS):
        for piece, depth in ways:
            rates[piece, depth].append(_bytes_per_s(files, walks[piece], room, piece=piece, depth=depth))
    return tuple(
        Trial(block_bytes=piece, depth=depth, bytes_per_s=statistics.median(rates[piece, depth]))
        for piece, depth in ways
    )


def _walk(files: WeightFiles, piece: int) -> Iterator[tuple[int, int]]:
    """File and offset of every whole piece, round and round: what is read again comes as late as can be."""
    sizes = [path.stat().st_size for path in files.paths]
    return itertools.cycle(
        (i, at) for i, size in enumerate(sizes) for at in range(0, size - piece + 1, piece)
    )


def _bytes_per_s(
    files: WeightFiles, walk: Iterator[tuple[int, int]], room: Arena, *, piece: int, depth: int
) -> float:
    """Threads that read one piece after the other until the time is over."""
    began = time.perf_counter()
    done = [0] * depth
    turn = threading.Lock()

    def work(worker: int) -> None:
        buffer = room.view(worker * piece, piece)
        while not done[worker] or time.perf_counter() - began < _TRIAL_S:
            with turn:
                path_id, at = next(walk)
            done[worker] += files.read_at(path_id, buffer, at)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(depth)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(done) / (time.perf_counter() - began)
