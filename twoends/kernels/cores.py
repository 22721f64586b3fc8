"""How many cores this process may use: its affinity, and the CPU quota of its control groups."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")


def allowed_cores() -> tuple[int, str]:
    """(cores, where the number comes from), at least 1."""
    cores, origin = _affinity()
    quota = cgroup_quota(_MEMBERSHIP, _CGROUP_ROOT)
    if quota is not None and quota < cores:
        return max(1, int(quota)), f"a control group allows {quota:g} of {cores} cores"
    return cores, origin


def _affinity() -> tuple[int, str]:
    everywhere = os.cpu_count() or 1
    if not hasattr(os, "sched_getaffinity"):
        return everywhere, "all cores of this machine"
    here = len(os.sched_getaffinity(0))
    if here < everywhere:
        return here, f"the affinity of this process allows {here} of {everywhere} cores"
    return here, "all cores of this machine"


def cgroup_quota(membership: Path, root: Path) -> float | None:
    """The least CPU quota, in cores, of the groups in `membership` and those above them; None without one.

    Version 2 keeps "quota period" in cpu.max, version 1 two files; "max" and -1 mean no limit.
    """
    if not membership.exists():
        return None
    quotas = []
    for line in membership.read_text().splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            hierarchies = [root, root / "unified"]
        elif "cpu" in controllers.split(","):
            hierarchies = [root / controllers, root / "cpu"]
        else:
            continue
        for hierarchy in hierarchies:
            quotas += [q for level in _levels(hierarchy, group) if (q := _quota_of(level)) is not None]
    return min(quotas, default=None)


def _levels(hierarchy: Path, group: str) -> list[Path]:
    """The directories of a group and its ancestors, as far as they can be seen from here."""
    parts = Path(group.lstrip("/")).parts
    return [hierarchy.joinpath(*parts[:depth]) for depth in range(len(parts) + 1)]


def _quota_of(directory: Path) -> float | None:
    if (directory / "cpu.max").is_file():
        quota, period = (directory / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    if (directory / "cpu.cfs_quota_us").is_file():
        quota_us = int((directory / "cpu.cfs_quota_us").read_text())
        period_us = int((directory / "cpu.cfs_period_us").read_text())
        return None if quota_us < 0 else quota_us / period_us
    return None
