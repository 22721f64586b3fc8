"""What this process and machine really use and have: measured, never assumed."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path


def resident_bytes() -> int:
    """Resident set of this process now."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except FileNotFoundError:
        return peak_resident_bytes()
    return pages * os.sysconf("SC_PAGE_SIZE")


def peak_resident_bytes() -> int:
    """Highest resident set of this process so far."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except FileNotFoundError:
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def available_bytes() -> int:
    """Memory that a new process could take: the system's estimate, within this process's limits."""
    limits = [_system_available(), *_cgroup_available()]
    soft, _ = resource.getrlimit(resource.RLIMIT_DATA)
    if soft != resource.RLIM_INFINITY:
        limits.append(soft)
    return min(limits)


def _system_available() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except FileNotFoundError:
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _cgroup_available() -> list[int]:
    """What the memory cgroups of this process leave, version 1 and 2; empty where there are none."""
    found: list[int] = []
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except FileNotFoundError:
        return found
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "memory":
            base = Path("/sys/fs/cgroup/memory") / path.lstrip("/")
            found += _left(base / "memory.limit_in_bytes", base / "memory.usage_in_bytes")
        elif controllers == "":
            base = Path("/sys/fs/cgroup") / path.lstrip("/")
            found += _left(base / "memory.max", base / "memory.current")
    return found


def _left(limit_file: Path, usage_file: Path) -> list[int]:
    try:
        limit, usage = limit_file.read_text().strip(), usage_file.read_text().strip()
    except OSError:
        return []
    if not limit.isdigit():
        return []
    return [max(int(limit) - int(usage), 0)]
