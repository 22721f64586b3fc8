"""Arenas: what they take is what they say, poisoned, and on huge pages where whole ones fit."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import numpy as np
import pytest

from twoends.engine.arena import PAGE, POISON, Arena

MB = 2**20
HUGE = 2 * MB


@pytest.mark.parametrize("num_bytes", [1, PAGE, 2 * MB - PAGE, 2 * MB, 5 * MB + 1, 33 * MB + PAGE])
def test_an_arena_has_its_bytes_rounded_to_pages_and_all_are_poisoned(num_bytes):
    arena = Arena(num_bytes)
    assert arena.num_bytes == arena.bytes_.size == -(-num_bytes // PAGE) * PAGE
    assert arena.bytes_.ctypes.data % PAGE == 0
    assert (arena.bytes_ == POISON).all()


def test_an_arena_of_nothing_takes_nothing():
    assert Arena(0).num_bytes == Arena(0).bytes_.size == 0


@pytest.mark.skipif(sys.platform != "linux" or mmap.PAGESIZE != PAGE, reason="reads Linux's pagemap")
@pytest.mark.parametrize("num_bytes", [3 * MB, 39 * MB + 5 * PAGE])
def test_an_arena_takes_no_memory_beyond_its_bytes(num_bytes):
    """A huge page that is used in part would be resident as a whole."""
    arena = Arena(num_bytes)
    first, count = arena.bytes_.ctypes.data // PAGE, num_bytes // PAGE
    assert _resident(first, count).all()
    assert not _resident(first + count, -(-num_bytes // HUGE) * HUGE // PAGE - count).any()


def _resident(first_page: int, count: int) -> np.ndarray:
    """Per page, the present bit of Linux's pagemap."""
    with Path("/proc/self/pagemap").open("rb") as file:
        file.seek(8 * first_page)
        return np.frombuffer(file.read(8 * count), np.uint64) >> np.uint64(63) == 1
