"""The work of `twoends doctor`. What is wrong with the kernels is said last, after all that was learnt."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import resource
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from twoends import __version__
from twoends.cli import load
from twoends.cli.command import Values
from twoends.cli.disks import DiskReport, keep_report, measure_disk
from twoends.cli.screen import Screen, columns, facts
from twoends.engine.memory import available_bytes
from twoends.errors import OptionError, TwoendsError
from twoends.kernels.choose import Choice
from twoends.kernels.cores import allowed_cores
from twoends.kernels.ops import Ops
from twoends.sizing.calibrate import NEEDED_BYTES, measure_compute
from twoends.sizing.calibration import ComputeRate, keep_compute
from twoends.units import format_bytes, format_duration, format_rate

_LIMITS = (("RLIMIT_AS", resource.RLIMIT_AS), ("RLIMIT_DATA", resource.RLIMIT_DATA))
_COMPILERS = ("c++", "g++", "clang++")


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What was learnt. `trouble` is why there are no kernels; `compute` is measured of native ones only."""

    choice: Choice | None
    trouble: TwoendsError | None
    compiler: str | None
    cores: int
    cores_origin: str
    physical_bytes: int
    available_bytes: int
    limits: dict[str, int]
    disk: DiskReport
    compute: ComputeRate | None


def doctor(values: Values, screen: Screen) -> None:
    """`twoends doctor`. Raises NotSound for wrong kernels, DoesNotFit where the disk is too full."""
    found = examine(values, screen)
    if values.json:
        screen.line(json.dumps(findings_object(found)))
    else:
        draw(found, screen)
    if found.trouble is not None:
        raise found.trouble


def examine(values: Values, screen: Screen) -> Findings:
    """Looks at everything, and keeps the disk's rate."""
    choice, trouble = None, None
    try:
        choice = load.choose_kernels(values)
    except OptionError:
        raise
    except TwoendsError as error:
        trouble = error
    screen.live(f"  measuring the disk of {values.disk.resolve()}")
    disk = _measure(values.disk)
    screen.clear_live()
    keep_report(disk)
    compute = _measure_compute(values.disk, choice, screen)
    cores, origin = allowed_cores()
    return Findings(
        choice=choice,
        trouble=trouble,
        compiler=next((path for name in _COMPILERS if (path := shutil.which(name))), None),
        cores=cores,
        cores_origin=origin,
        physical_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        available_bytes=available_bytes(),
        limits={
            name: soft
            for name, number in _LIMITS
            if (soft := resource.getrlimit(number)[0]) != resource.RLIM_INFINITY
        },
        disk=disk,
        compute=compute,
    )


def _measure_compute(directory: Path, choice: Choice | None, screen: Screen) -> ComputeRate | None:
    """Keeps what `plan` and `size` reckon with. Not with the numpy kernels, which would take minutes, and
    not where memory is short: neither is the machine that a speed would be asked of."""
    if choice is None or choice.isa is None or available_bytes() < NEEDED_BYTES:
        return None
    screen.live("  measuring the arithmetic on a small synthetic model")
    compute = measure_compute(directory, choice)
    screen.clear_live()
    keep_compute(directory, compute)
    return compute


def findings_object(found: Findings) -> dict[str, Any]:
    """For --json. Sizes in bytes, rates in bytes per second."""
    choice, disk = found.choice, found.disk
    return {
        "twoends": __version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "system": platform.system(),
        "machine": platform.machine(),
        "kernels": None
        if choice is None
        else {
            "backend": choice.ops.backend,
            "isa": choice.isa,
            "threads": choice.threads,
            "reasons": dict(choice.reasons),
            "operations": dict.fromkeys(_operations(), choice.ops.backend),
        },
        "trouble": None if found.trouble is None else str(found.trouble),
        "compute": None if found.compute is None else found.compute.as_object(),
        "compiler": found.compiler,
        "cores": found.cores,
        "cores_reason": found.cores_origin,
        "physical_bytes": found.physical_bytes,
        "available_bytes": found.available_bytes,
        "limits": found.limits,
        "disk": {
            "directory": str(disk.directory.resolve()),
            "read": disk.what,
            "direct_io": disk.is_direct,
            "direct_io_reason": disk.reason,
            "bytes_per_s": disk.engine.bytes_per_s,
            "piece_bytes": disk.engine.block_bytes,
            "depth": disk.engine.depth,
            "trials": [dataclasses.asdict(trial) for trial in disk.trials],
        },
    }


def draw(found: Findings, screen: Screen) -> None:
    """The screen; its last line is the next command."""
    system = f"{platform.system()} {platform.machine()}"
    heading = (
        f"twoends {__version__}   Python {platform.python_version()}   numpy {np.__version__}   {system}"
    )
    screen.line(screen.paint(heading, "bold"))
    for line in facts([*_kernel_facts(found), *_machine_facts(found)]):
        screen.line(line)
    screen.line()
    rows = [["  read size", "in flight", "rate", ""]]
    for trial in found.disk.trials:
        marks = [
            *(["as the engine will read it"] if trial == found.disk.engine else []),
            *(["usual"] if trial == found.disk.usual else []),
        ]
        size = f"{trial.block_bytes // 2**20} MiB"
        rows.append([size, str(trial.depth), format_rate(trial.bytes_per_s), ", ".join(marks)])
    for line in columns(rows, right=(0, 1, 2)):
        screen.line(line)
    if found.trouble is not None:
        return
    screen.line()
    ram = max(round(found.available_bytes * 0.8 / 1e9), 1)
    screen.line(f"  Next:  twoends plan MODEL --ram {ram}GB")


def _kernel_facts(found: Findings) -> list[tuple[str, str]]:
    if found.choice is None:
        return [("kernels", "NOT USABLE, see below")]
    return [
        *found.choice.reasons,
        ("operations", f"all {len(_operations())} by {found.choice.ops.backend}"),
        ("compiler", found.compiler or "none found (needed only to build the native kernels)"),
    ]


def _machine_facts(found: Findings) -> list[tuple[str, str]]:
    total, free = format_bytes(found.physical_bytes), format_bytes(found.available_bytes)
    limits = [f"{name} {format_bytes(size)}" for name, size in found.limits.items()]
    return [
        ("cores", f"{found.cores}, {found.cores_origin}"),
        *_compute_facts(found.compute),
        ("memory", f"{free} available of {total}" + (f"; limits: {', '.join(limits)}" if limits else "")),
        ("disk", f"{found.disk.directory.resolve()}: {found.disk.reason}; read {found.disk.what}"),
    ]


def _compute_facts(compute: ComputeRate | None) -> list[tuple[str, str]]:
    if compute is None:
        return [("passes", f"not measured: that needs native kernels and {format_bytes(NEEDED_BYTES)}")]
    rates = f"trunk at {format_rate(compute.bf16_bytes_per_s)}, experts at "
    rates += f"{format_rate(compute.mxfp4_bytes_per_s)} from memory"
    return [("passes", f"{rates}; {format_duration(compute.layer_s)} a layer besides")]


def _operations() -> list[str]:
    return [field.name for field in dataclasses.fields(Ops) if field.name != "backend"]


def _measure(directory: Path) -> DiskReport:
    try:
        return measure_disk(directory)
    except OSError as error:
        raise OptionError(
            f"--disk: {directory} can't be measured: {error.strerror}.",
            remedies=["Name a directory in which a file can be written:  twoends doctor --disk DIR"],
        ) from None
