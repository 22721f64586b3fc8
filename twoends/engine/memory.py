"""What this process and machine really use and have: measured, never assumed."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

_DEFAULT_SHARE = 0.8


def resident_bytes() -> int:
    """Resident set of this process now."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except FileNotFoundError:
        return peak_resident_bytes()
    return pages * os.sysconf("SC_PAGE_SIZE")


def counted_bytes() -> int:
    """What this process takes of its budget now: its resident set.

    Under a data limit of the system (RLIMIT_DATA) memory counts when it is asked for, touched or
    not: BLAS alone reserves tens of megabytes that it never touches. Then that count, if larger.
    """
    resident = resident_bytes()
    if resource.getrlimit(resource.RLIMIT_DATA)[0] == resource.RLIM_INFINITY:
        return resident
    return max(resident, _status_bytes("VmData") or 0)


def peak_resident_bytes() -> int:
    """Highest resident set of this process so far."""
    found = _status_bytes("VmHWM")
    if found is not None:
        return found
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def default_budget_bytes() -> int:
    """The budget where none is named: most of what is available now."""
    return int(available_bytes() * _DEFAULT_SHARE)


def available_bytes() -> int:
    """Memory that a new process could take: the system's estimate, within this process's limits."""
    left = [max(limit - usage, 0) for limit, usage in _cgroups()]
    return min([_system_available(), *left, *_data_limit()])


def hard_limit_bytes() -> int:
    """What this process can never take more than: a data limit, a memory cgroup's, the machine's memory."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([physical, *(limit for limit, _ in _cgroups()), *_data_limit()])


def _data_limit() -> list[int]:
    soft, _ = resource.getrlimit(resource.RLIMIT_DATA)
    return [] if soft == resource.RLIM_INFINITY else [soft]


def _status_bytes(field: str) -> int | None:
    """A size from /proc/self/status; None on systems without it."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except FileNotFoundError:
        return None
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def _system_available() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except FileNotFoundError:
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _cgroups() -> list[tuple[int, int]]:
    """(limit, usage) of the memory cgroups of this process and their parents, version 1 and 2."""
    found: list[tuple[int, int]] = []
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except FileNotFoundError:
        return found
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "memory":
            found += _up_to(Path("/sys/fs/cgroup/memory"), path, "limit_in_bytes", "usage_in_bytes")
        elif controllers == "":
            found += _up_to(Path("/sys/fs/cgroup"), path, "max", "current")
    return found


def _up_to(root: Path, path: str, limit: str, usage: str) -> list[tuple[int, int]]:
    """A limit may stand on any group above the own one."""
    own = root / path.lstrip("/")
    groups = [own, *(parent for parent in own.parents if parent == root or root in parent.parents)]
    found: list[tuple[int, int]] = []
    for group in groups:
        try:
            words = [(group / f"memory.{name}").read_text().strip() for name in (limit, usage)]
        except OSError:
            continue
        # "max" is no limit.
        if words[0].isdigit():
            found.append((int(words[0]), int(words[1])))
    return found
