"""Memory limits that are enforced from outside the process, and page caches that hold nothing of a model.

A memory cgroup (version 1 or 2) counts everything, page cache and kernel memory included; making one
needs rights. RLIMIT_DATA needs none and counts private writable memory, touched or not.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PROT_READ, _MAP_SHARED = 1, 1


@dataclass(frozen=True, kw_only=True)
class Limited:
    """How a command ended under a limit; `peak_bytes` is the cgroup's own measure, None without one."""

    code: int
    stdout: str
    stderr: str
    peak_bytes: int | None
    failures: int

    def json(self) -> dict:
        assert self.code == 0, f"exit {self.code}\n{self.stderr}"
        return json.loads(self.stdout)


class Group:
    """A memory cgroup of its own with a hard limit."""

    def __init__(self, directory: Path, *, version: int) -> None:
        self._directory, self._version = directory, version

    def enter(self) -> None:
        """Moves the calling process in; safe between fork and exec."""
        (self._directory / "cgroup.procs").write_text(str(os.getpid()))

    def peak_bytes(self) -> int:
        name = "memory.peak" if self._version == 2 else "memory.max_usage_in_bytes"
        return int((self._directory / name).read_text())

    def failures(self) -> int:
        """How often the limit was hit (version 1) or a process was killed for it (version 2)."""
        if self._version == 1:
            return int((self._directory / "memory.failcnt").read_text())
        words = (self._directory / "memory.events").read_text().split()
        return int(words[words.index("oom_kill") + 1])


@contextlib.contextmanager
def memory_group(limit_bytes: int) -> Iterator[Group | None]:
    """A new cgroup below this process's own, or None where none can be made."""
    made = _make_group(limit_bytes)
    if made is None:
        yield None
        return
    group, directory = made
    try:
        yield group
    finally:
        for _ in range(50):
            try:
                directory.rmdir()
                break
            except OSError:
                # The last process has ended, but the kernel has not yet counted it out.
                time.sleep(0.02)


def _make_group(limit_bytes: int) -> tuple[Group, Path] | None:
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, own = line.split(":", 2)
            if controllers not in ("memory", ""):
                continue
            version = 1 if controllers == "memory" else 2
            base = Path("/sys/fs/cgroup/memory" if version == 1 else "/sys/fs/cgroup") / own.lstrip("/")
            directory = base / f"twoends-test-{os.getpid()}-{time.monotonic_ns()}"
            limit = "memory.limit_in_bytes" if version == 1 else "memory.max"
            try:
                directory.mkdir()
            except OSError:
                continue
            try:
                (directory / limit).write_text(str(limit_bytes))
                return Group(directory, version=version), directory
            except OSError:
                directory.rmdir()
    return None


def run_limited(
    words: list[str], *, data_bytes: int | None = None, group: Group | None = None, timeout_s: float = 110
) -> Limited:
    """`python -m twoends WORDS` under a data limit, within a group, or both."""

    def confine() -> None:
        if group is not None:
            group.enter()
        if data_bytes is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (data_bytes, data_bytes))

    done = subprocess.run(
        [sys.executable, "-m", "twoends", *words],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        preexec_fn=confine,
        cwd=Path(__file__).resolve().parents[2],
        check=False,
    )
    return Limited(
        code=done.returncode,
        stdout=done.stdout,
        stderr=done.stderr,
        peak_bytes=None if group is None else group.peak_bytes(),
        failures=0 if group is None else group.failures(),
    )


def evict(directory: Path) -> int:
    """Drops the page cache of a model's files; gives the pages that stayed all the same."""
    return sum(_evict_file(path) for path in sorted(directory.iterdir()) if path.is_file())


def _evict_file(path: Path) -> int:
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if not size:
            return 0
        # Dirty pages don't go; a checkpoint that was just written has them.
        os.fdatasync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return _cached_pages(file.fileno(), size)


def _cached_pages(fd: int, size: int) -> int:
    page = os.sysconf("SC_PAGE_SIZE")
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    address = libc.mmap(None, size, _PROT_READ, _MAP_SHARED, fd, 0)
    pages = (ctypes.c_ubyte * -(-size // page))()
    try:
        if libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), pages):
            raise OSError(ctypes.get_errno(), "mincore")
    finally:
        libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(size))
    return sum(state & 1 for state in bytes(pages))
