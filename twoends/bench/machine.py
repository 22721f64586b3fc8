"""The card of a machine: without it a table of speeds can't be compared with another."""

from __future__ import annotations

import datetime
import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from twoends import __version__
from twoends.kernels.cores import allowed_cores
from twoends.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What a measurement ran on. `cores` are those this process may use; empty text where unknown.

    `load` is the number of processes that wanted a core in the last minute, ours not counted when it began.
    """

    cpu: str
    cores: int
    load: float
    last_cache_bytes: int
    memory_bytes: int
    disk: str
    kernel: str
    python: str
    build: str
    date: str

    def rows(self) -> list[tuple[str, str]]:
        """(name, value) lines for a screen."""
        cache = f", {format_bytes(self.last_cache_bytes)} last cache" if self.last_cache_bytes else ""
        return [
            ("machine", f"{self.cpu or 'unknown CPU'}, {self.cores} cores{cache}"),
            ("load", f"{self.load:.1f} before the start{self._busy()}"),
            ("memory", format_bytes(self.memory_bytes) if self.memory_bytes else "unknown"),
            ("disk", self.disk or "unknown"),
            ("system", f"{self.kernel}, {self.python}"),
            ("build", self.build),
            ("date", self.date),
        ]

    def _busy(self) -> str:
        return "; others are using this machine, so rates are low" if self.load > self.cores / 2 else ""

    def as_json(self) -> dict[str, object]:
        """The fields by name, ready for json.dumps."""
        return asdict(self)


def machine(*, directory: Path | None = None, built_by: str = "") -> Machine:
    """This machine now; `directory` names the disk, `built_by` the compiler of the native kernels."""
    build = f"twoends {__version__}, numpy {np.__version__}"
    return Machine(
        cpu=_cpu_name(),
        cores=allowed_cores()[0],
        load=os.getloadavg()[0],
        last_cache_bytes=last_cache_bytes(),
        memory_bytes=_memory_bytes(),
        disk="" if directory is None else _disk_of(directory),
        kernel=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=f"{platform.python_implementation()} {platform.python_version()}",
        build=f"{build}, {built_by}" if built_by else build,
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )


def last_cache_bytes(root: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """Size of the largest cache that the system lists, or 0."""
    sizes = [_kib(path.read_text()) for path in sorted(root.glob("index*/size"))]
    return max(sizes, default=0)


def _kib(text: str) -> int:
    """ "32768K" in bytes."""
    number, unit = text.strip()[:-1], text.strip()[-1:]
    factor = {"K": 2**10, "M": 2**20}.get(unit)
    return int(number) * factor if factor is not None and number.isdigit() else 0


def _cpu_name() -> str:
    path = Path("/proc/cpuinfo")
    if path.exists():
        for line in path.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor()


def _memory_bytes() -> int:
    if "SC_PHYS_PAGES" not in os.sysconf_names:
        return 0
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _disk_of(directory: Path) -> str:
    """Device and file system of the mount that holds `directory`, from the longest matching mount point."""
    mounts = Path("/proc/self/mounts")
    if not mounts.exists():
        return ""
    place = directory.resolve()
    best, found = -1, ""
    for line in mounts.read_text().splitlines():
        device, point, file_system = line.split(" ")[:3]
        mount = Path(point.replace("\\040", " "))
        if place.is_relative_to(mount) and len(mount.parts) >= best:
            best, found = len(mount.parts), f"{device}, {file_system}"
    return found
