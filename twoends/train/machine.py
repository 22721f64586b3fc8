"""What training asks of the process before torch is loaded: threads that sleep, memory that is kept."""

from __future__ import annotations

import ctypes
import os
import sys

# glibc's mallopt: the least size served by mmap, the size at which free memory goes back, the step of growth.
_MALLOPT = {
    "M_MMAP_THRESHOLD": (-3, 1 << 30),
    "M_TRIM_THRESHOLD": (-1, (1 << 31) - 1),
    "M_TOP_PAD": (-2, 1 << 28),
}
# How often GNU's OpenMP looks before it sleeps: some tenths of a millisecond.
_SPINS = "20000"


def settle_process() -> None:
    """Call before torch is imported.

    Threads that wait for each other spin for a moment and then sleep. Spinning on (milliseconds, if nothing
    is said) took five times the processor time of the step itself on a machine that did other work too;
    sleeping at once cost a tenth of a step in wake-ups, and some runs stayed with all threads on one core.
    Freed activations stay with the process, or every step faults all its pages in again (a quarter of the
    time of a step).
    """
    if "torch" in sys.modules:
        raise RuntimeError("settle_process has no effect once torch is loaded")
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ["OMP_WAIT_POLICY"] = "passive"
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):
            for option, value in _MALLOPT.values():
                libc.mallopt(option, value)


def use_threads(count: int | None) -> int:
    """Let torch compute on `count` threads (None: every core this process may use); returns the number."""
    import torch

    count = count or len(
        os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    )
    torch.set_num_threads(count)
    return count
