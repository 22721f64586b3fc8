"""Drops a model's files from the page cache, and looks whether they are gone.

A page that was cached before a capped run is charged to nobody in it: the limit would look kept and
the disk fast.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from pathlib import Path

_PROT_READ, _MAP_SHARED = 1, 1


def evict(paths: Iterable[Path]) -> int:
    """Asks for the files' pages to be dropped; gives the bytes that are in memory all the same."""
    return sum(_evict_file(path) for path in paths)


def can_evict() -> bool:
    """Whether this system can drop files from its page cache, and say what is left."""
    return hasattr(os, "posix_fadvise") and hasattr(ctypes.CDLL(None), "mincore")


def _evict_file(path: Path) -> int:
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if not size:
            return 0
        # Pages not yet written don't go; a checkpoint that was just made has them.
        os.fdatasync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return _cached_bytes(file.fileno(), size)


def _cached_bytes(fd: int, size: int) -> int:
    page = os.sysconf("SC_PAGE_SIZE")
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    address = libc.mmap(None, size, _PROT_READ, _MAP_SHARED, fd, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), "mmap")
    pages = (ctypes.c_ubyte * -(-size // page))()
    try:
        if libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), pages):
            raise OSError(ctypes.get_errno(), "mincore")
    finally:
        libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(size))
    return page * sum(state & 1 for state in bytes(pages))
