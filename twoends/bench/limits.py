"""Memory limits that the system enforces on a command from outside, tried out before they are trusted.

A memory cgroup (version 1 or 2) counts everything: page cache and kernel memory too; making one
needs rights. RLIMIT_DATA needs none; it counts private writable memory, touched or not.
"""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from twoends.errors import TwoendsError
from twoends.units import format_bytes

Cap = Literal["cgroup", "rlimit", "none"]

_TRIAL_BYTES = 100_000_000
# Takes twice the trial's limit and touches every page of it.
_GLUTTON = (
    f"import mmap; m = mmap.mmap(-1, {2 * _TRIAL_BYTES}, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)\n"
    "for i in range(0, len(m), 4096): m[i] = 1"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a command ended. `peak_bytes` and `hits` are the cgroup's own count; None without one."""

    code: int
    stdout: str
    stderr: str
    peak_bytes: int | None
    hits: int | None

    @property
    def was_killed(self) -> bool:
        """Ended by a signal, as the kernel does to a group that is over its limit."""
        return self.code < 0


def run_capped(words: Sequence[str], *, cap: Cap, limit_bytes: int, timeout_s: float | None = None) -> Ended:
    """Runs `words` under the limit. Raises TwoendsError where the limit can't be set."""
    match cap:
        case "cgroup":
            with _memory_group(limit_bytes) as group:
                return _run(words, group=group, timeout_s=timeout_s)
        case "rlimit":
            return _run(words, data_bytes=limit_bytes, timeout_s=timeout_s)
        case "none":
            return _run(words, timeout_s=timeout_s)


def try_cap(cap: Cap) -> str | None:
    """None if a program that takes twice a limit of this kind really ends; else the reason to doubt it."""
    words = [sys.executable, "-I", "-c", _GLUTTON]
    try:
        ended = run_capped(words, cap=cap, limit_bytes=_TRIAL_BYTES, timeout_s=60)
    except (TwoendsError, OSError, subprocess.SubprocessError) as error:
        return str(error)
    if ended.code == 0:
        took, limit = format_bytes(2 * _TRIAL_BYTES), format_bytes(_TRIAL_BYTES)
        return f"a program took {took} under a limit of {limit}"
    return None


class _Group:
    """A memory cgroup of its own with a hard limit."""

    def __init__(self, directory: Path, *, version: int) -> None:
        self.directory, self._version = directory, version

    def enter(self) -> None:
        """Moves the calling process in; safe between fork and exec."""
        (self.directory / "cgroup.procs").write_text(str(os.getpid()))

    def peak_bytes(self) -> int | None:
        """The most that the group took; kernels before 5.19 don't keep it in version 2."""
        name = "memory.peak" if self._version == 2 else "memory.max_usage_in_bytes"
        with contextlib.suppress(FileNotFoundError):
            return int((self.directory / name).read_text())
        return None

    def hits(self) -> int:
        """How often the group was at its limit."""
        if self._version == 1:
            return int((self.directory / "memory.failcnt").read_text())
        words = (self.directory / "memory.events").read_text().split()
        return int(words[words.index("max") + 1])


@contextlib.contextmanager
def _memory_group(limit_bytes: int) -> Iterator[_Group]:
    group = _make_group(limit_bytes)
    try:
        yield group
    finally:
        for _ in range(50):
            try:
                group.directory.rmdir()
                break
            except OSError:
                # The last process has ended, but the kernel has not yet counted it out.
                time.sleep(0.02)


def _make_group(limit_bytes: int) -> _Group:
    reasons = []
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except FileNotFoundError:
        lines = []
    for line in lines:
        _, controllers, own = line.split(":", 2)
        if controllers not in ("memory", ""):
            continue
        version = 1 if controllers == "memory" else 2
        base = Path("/sys/fs/cgroup/memory" if version == 1 else "/sys/fs/cgroup")
        directory = base / own.lstrip("/") / f"twoends-{os.getpid()}-{time.monotonic_ns()}"
        try:
            directory.mkdir()
            try:
                _set_limit(directory, version, limit_bytes)
            except OSError:
                directory.rmdir()
                raise
            return _Group(directory, version=version)
        except OSError as error:
            reasons.append(f"version {version}: {error.strerror}")
    raise TwoendsError(f"no memory cgroup can be made here ({'; '.join(reasons) or 'this system has none'}).")


def _set_limit(directory: Path, version: int, limit_bytes: int) -> None:
    if version == 1:
        (directory / "memory.limit_in_bytes").write_text(str(limit_bytes))
        return
    (directory / "memory.max").write_text(str(limit_bytes))
    # Swapped memory would be memory beyond the limit.
    with contextlib.suppress(FileNotFoundError):
        (directory / "memory.swap.max").write_text("0")


def _run(
    words: Sequence[str],
    *,
    group: _Group | None = None,
    data_bytes: int | None = None,
    timeout_s: float | None = None,
) -> Ended:
    def confine() -> None:
        if group is not None:
            group.enter()
        if data_bytes is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (data_bytes, data_bytes))

    done = subprocess.run(
        list(words), capture_output=True, text=True, timeout=timeout_s, preexec_fn=confine, check=False
    )
    return Ended(
        code=done.returncode,
        stdout=done.stdout,
        stderr=done.stderr,
        peak_bytes=None if group is None else group.peak_bytes(),
        hits=None if group is None else group.hits(),
    )
