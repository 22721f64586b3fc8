"""`twoends bench kernels`: how fast each kernel is, after its bits were checked.

twoends.bench.kernels measures and gives the card of the machine and the rows of the table. It raises
NotSound before any rate is known.
"""

from __future__ import annotations

import json

from twoends.cli.command import JSON, Argument, Command, Option, Values
from twoends.cli.options import THREADS
from twoends.cli.screen import Screen, columns, facts
from twoends.errors import OptionError

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
        screen.line(json.dumps(report.as_json()))
        return
    for line in facts(report.card()):
        screen.line(line)
    screen.line()
    for line in columns([report.headings(), *report.table()], right=(2, 3, 4, 5, 6)):
        screen.line(line)
