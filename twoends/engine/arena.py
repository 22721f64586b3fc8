"""Memory that is taken once, touched at once and counted: nothing the engine holds grows later."""

from __future__ import annotations

import ctypes
import mmap
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from twoends.kernels.ops import Bytes

PAGE = 4096
# A disk writes into huge pages up to half faster than into small ones: their list is shorter.
_HUGE_PAGE = 2 * 2**20
_POPULATE_FROM_BYTES = 32 * 2**20
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
            self.bytes_ = np.frombuffer(_map(self.num_bytes), np.uint8, self.num_bytes)
            if self.num_bytes >= _POPULATE_FROM_BYTES:
                _populate(self.bytes_)
            self.bytes_.fill(POISON)

    def view(self, start: int, num_bytes: int) -> memoryview:
        """Bytes start .. start + num_bytes - 1, writable."""
        return self.bytes_[start : start + num_bytes].data


def _map(num_bytes: int) -> mmap.mmap:
    """Private memory, so that a data limit of the system counts it; on huge pages where whole ones fit.

    Linux puts a mapping of whole huge pages on their border (from 6.7 on). What is asked for beyond
    `num_bytes` to this end is never touched, so it takes no memory.
    """
    if num_bytes < _HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = -(-num_bytes // _HUGE_PAGE) * _HUGE_PAGE
    block = mmap.mmap(-1, whole, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # The last page is a huge one only if all of it is used, and the start need not lie on a border.
    address = np.frombuffer(block, np.uint8).ctypes.data
    first = -address % _HUGE_PAGE
    end = (address + num_bytes) // _HUGE_PAGE * _HUGE_PAGE - address
    if end > first:
        block.madvise(mmap.MADV_HUGEPAGE, first, end - first)
    return block


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
