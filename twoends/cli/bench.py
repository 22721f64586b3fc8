"""`twoends bench kernels`: how fast each kernel is, after its bits were checked.

twoends.bench.kernels measures: `bench_kernels(threads=, isa=, progress=)` gives a frozen dataclass with
`machine` (name, value) rows, `isa`, `threads`, `memory_bytes_per_s` and `rows`, each with `kernel`,
`case` (its shape in words) and `bytes_per_s` (median). It raises NotSound before any rate is known.
"""

from __future__ import annotations

import dataclasses
import json

from twoends.cli.command import JSON, Argument, Command, Option, Values
from twoends.cli.options import THREADS
from twoends.cli.screen import Screen, columns, facts, plural, share_text
from twoends.errors import OptionError
from twoends.units import format_rate

_SUBJECTS = ("kernels",)


def command() -> Command:
    """The description of `bench`."""
    return Command(
        name="bench",
        phrase="measure kernels",
        about=(
            "'bench kernels' checks every operation's bits, then prints its rate and the share of the "
            "measured memory bandwidth. No rate is printed where a bit is wrong (exit 4)."
        ),
        arguments=(Argument(name="WHAT", help="kernels", required=True),),
        options=(
            THREADS,
            Option(flag="--isa", value="X", help="instruction set, instead of the fastest"),
            JSON,
        ),
        examples=("twoends bench kernels --threads 1",),
        act=_act,
    )


def _act(values: Values, screen: Screen) -> None:
    if values.what not in _SUBJECTS:
        raise OptionError(f"'{values.what}' can't be measured.", evidence=[("known", ", ".join(_SUBJECTS))])
    from twoends.bench.kernels import bench_kernels

    report = bench_kernels(threads=values.threads, isa=values.isa, progress=screen.live)
    screen.clear_live()
    if values.json:
        screen.line(json.dumps(dataclasses.asdict(report)))
        return
    for line in facts([*report.machine, ("kernels", f"{report.isa}, {plural(report.threads, 'thread')}")]):
        screen.line(line)
    screen.line(f"  memory reads at {format_rate(report.memory_bytes_per_s)}, measured now")
    screen.line()
    rows = [["kernel", "shape", "rate", "of memory"]]
    for row in report.rows:
        share = share_text(row.bytes_per_s, report.memory_bytes_per_s)
        rows.append([row.kernel, row.case, format_rate(row.bytes_per_s), share])
    for line in columns(rows, right=(2, 3)):
        screen.line(line)
