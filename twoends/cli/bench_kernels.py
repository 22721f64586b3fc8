"""The screen of `twoends bench kernels`: the card of the machine, then a row per kernel.

twoends.bench.kernels raises NotSound before any rate is known.
"""

from __future__ import annotations

import json

from twoends.bench.kernels import bench_kernels
from twoends.cli.command import Values
from twoends.cli.screen import Screen, columns, facts


def show_kernels(values: Values, screen: Screen) -> None:
    """`twoends bench kernels`."""
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
