"""The screen of `twoends bench router`: one row per trace, and what each column would be by chance."""

from __future__ import annotations

import json
from pathlib import Path

from twoends.bench.router import CAPACITIES, RouterReport, router_report
from twoends.bench.traces import read_trace
from twoends.cli.command import Values
from twoends.cli.screen import Screen, columns

_SHOWN = ("lru", "ours", "belady")


def show_router(values: Values, screen: Screen) -> None:
    """`twoends bench router TRACE`. Raises OptionError for a trace that is none."""
    paths = [Path(values.object), *values.also]
    reports = {str(path): router_report(read_trace(path, order=values.order)) for path in paths}
    if values.json:
        screen.line(json.dumps({name: report.as_json() for name, report in reports.items()}))
        return
    for line in tables(reports):
        screen.line(line)


def tables(reports: dict[str, RouterReport]) -> list[str]:
    """Load and reuse, then the hits of a cache in % of all requests."""
    load: list[tuple[str, ...]] = [
        ("trace", "tokens", "max violation", "never chosen", "reuse", "by load alone", "if even")
    ]
    for name, report in reports.items():
        shares = (report.reuse, report.reuse_if_independent, report.reuse_if_even)
        load.append((
            name, f"{report.num_tokens:,}", f"{report.max_violation:.2f}",
            f"{100 * report.unused_experts:.0f} %", *(f"{100 * share:.1f} %" for share in shares),
        ))  # fmt: skip
    head = [f"{policy} at {cycles:g}" for cycles in CAPACITIES for policy in _SHOWN]
    hits: list[tuple[str, ...]] = [("hits in %", *head)]
    for name, report in reports.items():
        shown = [report.hits[cycles][policy] for cycles in CAPACITIES for policy in _SHOWN]
        hits.append((name, *(f"{100 * share:.1f}" for share in shown)))
    right = tuple(range(1, 10))
    return [*columns(load, right=right[:6]), "", *columns(hits, right=right)]
