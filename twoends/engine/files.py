"""Open weight files for positional reads that bypass the page cache, where that can be trusted.

Linux: O_DIRECT. At open one block is read both ways and compared; where the system refuses or
the bytes differ, buffered reads are used and the pages are given back after each read. macOS:
F_NOCACHE. `reason` says which and why.
"""

from __future__ import annotations

import errno
import mmap
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from twoends.engine.arena import PAGE
from twoends.errors import CheckpointError

# (file descriptor, buffer, offset) -> bytes read; the seam where tests inject faults.
ReadAt = Callable[[int, memoryview, int], int]


def read_at(fd: int, buffer: memoryview, offset: int) -> int:
    """One positional read; may be short."""
    return os.preadv(fd, [buffer], offset)


class WeightFiles:
    """File descriptors of all shards, opened once."""

    def __init__(self, paths: Sequence[Path], *, direct: bool = True, read: ReadAt = read_at) -> None:
        """`direct=False` asks for buffered reads. Raises CheckpointError for a file that can't be opened."""
        self.paths = tuple(paths)
        self._read = read
        self._fds = [_open(path, os.O_RDONLY) for path in paths]
        self.reason = "buffered reads, as asked"
        self.direct = False
        if direct:
            self._try_direct()

    def read_at(self, path_id: int, buffer: memoryview, offset: int) -> int:
        """Bytes read into `buffer` from `offset`; 0 at the end of the file. Raises OSError."""
        count = self._read(self._fds[path_id], buffer, offset)
        self._forget(path_id, offset, len(buffer))
        return count

    def read_run_at(self, path_id: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Bytes read into `buffers` in turn: by one call, unless reads are injected. Raises OSError."""
        if self._read is not read_at:
            return self._read_one_by_one(path_id, buffers, offset)
        count = os.preadv(self._fds[path_id], buffers, offset)
        self._forget(path_id, offset, sum(map(len, buffers)))
        return count

    def _read_one_by_one(self, path_id: int, buffers: Sequence[memoryview], offset: int) -> int:
        total = 0
        for buffer in buffers:
            count = self.read_at(path_id, buffer, offset + total)
            total += count
            if count < len(buffer):
                break
        return total

    def _forget(self, path_id: int, offset: int, num_bytes: int) -> None:
        if not self.direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._fds[path_id], offset, num_bytes, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Closes every file."""
        for fd in self._fds:
            os.close(fd)
        self._fds = []

    def _try_direct(self) -> None:
        if sys.platform == "darwin":
            self._disable_cache_on_macos()
            return
        if not hasattr(os, "O_DIRECT"):
            self.reason = "buffered reads: this system has no O_DIRECT"
            return
        direct_fds: list[int] = []
        try:
            for path in self.paths:
                direct_fds.append(os.open(path, os.O_RDONLY | os.O_DIRECT))
                self._compare(path, direct_fds[-1], self._fds[len(direct_fds) - 1])
        except (OSError, _DirectReadLies) as error:
            for fd in direct_fds:
                os.close(fd)
            self.reason = f"buffered reads: O_DIRECT is not usable here ({error})"
            return
        for fd in self._fds:
            os.close(fd)
        self._fds, self.direct, self.reason = direct_fds, True, "O_DIRECT, verified at open"

    def _compare(self, path: Path, direct_fd: int, buffered_fd: int) -> None:
        """One block read both ways; a system that lies about O_DIRECT shows here, not in the text."""
        block = memoryview(mmap.mmap(-1, PAGE))
        count = os.preadv(direct_fd, [block], 0)
        expected = os.pread(buffered_fd, PAGE, 0)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(buffered_fd, 0, PAGE, os.POSIX_FADV_DONTNEED)
        if bytes(block[:count]) != expected:
            raise _DirectReadLies(f"{path.name} reads differently with it")

    def _disable_cache_on_macos(self) -> None:
        import fcntl

        f_nocache = getattr(fcntl, "F_NOCACHE", 48)
        for fd in self._fds:
            fcntl.fcntl(fd, f_nocache, 1)
        self.direct, self.reason = True, "F_NOCACHE"


class _DirectReadLies(Exception):
    """A direct read gave other bytes than a buffered one."""


def _open(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags)
    except OSError as error:
        reason = "there are too many open files" if error.errno == errno.EMFILE else error.strerror
        raise CheckpointError(
            f"{path.name} can't be opened: {reason}.", evidence=[("file", str(path))]
        ) from error
