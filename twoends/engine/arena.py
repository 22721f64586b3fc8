"""Memory that is taken once, touched at once and counted: nothing the engine holds grows later."""

from __future__ import annotations

import ctypes
import mmap
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from twoends.kernels.ops import Bytes

PAGE = 4096
# Below this size huge pages would round a small arena up by more than they help.
_HUGE_FROM_BYTES = 32 * 2**20
_POPULATE_BYTES = 64 * 2**20
_POPULATE_THREADS = 4
_MADV_POPULATE_WRITE = 23
# NaN in bf16 and binary32, and the NaN scale of MXFP4: a byte read before it was filled shows.
POISON = 0xFF


def align_down(offset: int) -> int:
    """The page border at or before `offset`."""
    return offset & -PAGE


def align_up(offset: int) -> int:
    """The page border at or after `offset`."""
    return -(-offset // PAGE) * PAGE


class Arena:
    """One page-aligned block of private memory, poisoned, so every page is resident from the start."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = align_up(max(num_bytes, 1)) if num_bytes else 0
        self.bytes_: Bytes = np.empty(0, np.uint8)
        if self.num_bytes:
            # Private, so that a data limit of the system counts it.
            block = mmap.mmap(-1, self.num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if self.num_bytes >= _HUGE_FROM_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
                block.madvise(mmap.MADV_HUGEPAGE)
            self.bytes_ = np.frombuffer(block, np.uint8)
            if self.num_bytes >= _HUGE_FROM_BYTES:
                _populate(self.bytes_)
            self.bytes_.fill(POISON)

    def view(self, start: int, num_bytes: int) -> memoryview:
        """Bytes start .. start + num_bytes - 1, writable."""
        return self.bytes_[start : start + num_bytes].data


def _populate(block: Bytes) -> None:
    """Asks Linux for every page of a large block from several threads at once.

    The first touch of memory can cost seconds a gigabyte on a virtual machine. Where the system
    doesn't know the request (before Linux 5.14), the fill that follows does the same, slower.
    """
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None)
    address = block.ctypes.data

    def ask(start: int) -> None:
        size = min(_POPULATE_BYTES, block.size - start)
        libc.madvise(ctypes.c_void_p(address + start), ctypes.c_size_t(size), _MADV_POPULATE_WRITE)

    with ThreadPoolExecutor(_POPULATE_THREADS) as pool:
        list(pool.map(ask, range(0, block.size, _POPULATE_BYTES)))
