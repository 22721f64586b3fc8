"""`twoends doctor`: what this machine can do, checked and measured."""

from __future__ import annotations

from pathlib import Path

from twoends.cli.command import JSON, Command, Option, Values
from twoends.cli.options import KERNELS, THREADS
from twoends.cli.screen import Screen


def command() -> Command:
    """The description of `doctor`."""
    return Command(
        name="doctor",
        phrase="check this machine: kernels, memory, disk",
        about=(
            "Checks the kernels bit for bit, counts cores and memory within this process's limits, and "
            "measures a disk by reading the weights in DIR in several ways, or a temporary file of 256 MB "
            "where there are none. The way to read and its rate are kept: 'run' reads that disk so. Then "
            "passes of a small synthetic model (180 MB, removed again) say how fast this machine multiplies; "
            "'plan' and 'size' estimate with both. Exit 4 if a kernel's bits are wrong."
        ),
        options=(
            Option(
                flag="--disk",
                value="DIR",
                convert=Path,
                default=Path(),
                help="measure the disk of this directory; best the checkpoint's own (here)",
            ),
            THREADS,
            KERNELS,
            JSON,
        ),
        examples=("twoends doctor --disk /data",),
        act=_act,
    )


def _act(values: Values, screen: Screen) -> None:
    from twoends.cli.doctor_machine import doctor

    doctor(values, screen)
