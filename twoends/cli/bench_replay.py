"""The screen of `twoends bench replay`: what each policy would have kept of a trace."""

from __future__ import annotations

import json
from pathlib import Path

from twoends.bench.plots import Curve, Plot, can_draw, check_target, draw_plot, text_plot
from twoends.bench.replay import (
    CAPACITIES,
    POLICIES,
    CapacityRow,
    ReplayReport,
    measured_profile,
    replay,
)
from twoends.bench.traces import RoutingTrace, check_model, read_trace
from twoends.cli.command import Values
from twoends.cli.screen import Screen, facts, share_text
from twoends.engine.open import Checkpoint
from twoends.engine.profile import ExpertProfile, write_profile
from twoends.errors import OptionError

_NAMES = {"lru": "LRU", "lfu": "LFU", "s3fifo": "S3-FIFO", "ours": "ours", "belady": "Belady"}


def show_replay(values: Values, screen: Screen) -> None:
    """`twoends bench replay TRACE`. Raises OptionError for a trace that is none, or another model's."""
    path = Path(values.object)
    if values.plot is not None:
        check_target(values.plot)
    trace = read_trace(path, order=values.order)
    if values.save_profile is not None and values.model is None:
        raise OptionError(
            "--save-profile keeps what is true of one model.", remedies=["Name it:  --model DIR"]
        )
    checkpoint = None if values.model is None else Checkpoint.open(values.model)
    if checkpoint is not None:
        check_model(trace, checkpoint.index.fingerprint, path=path)
    requests = trace.requests()
    if not values.json:
        for line in facts(
            _facts(trace.form, trace.ranked, trace.num_tokens, len(trace.layers), len(requests))
        ):
            screen.line(line)
        screen.line()
        screen.line("  hits in % of all requests; a cycle is what one token asks for in all layers")
        screen.line(_heading())
    report = replay(
        trace,
        capacities=values.capacities or CAPACITIES,
        row_done=lambda row: None if values.json else screen.line(_row(row, len(requests))),
    )
    if values.json:
        screen.line(json.dumps(report.as_json()))
    else:
        _end(report, screen)
    if checkpoint is not None and values.save_profile is not None:
        write_profile(values.save_profile, _measured(trace, report, checkpoint))
        screen.note(f"  profile written to {values.save_profile}")
    if values.plot is not None:
        _draw(report, values.plot, screen, quiet=values.json)


def _measured(trace: RoutingTrace, report: ReplayReport, checkpoint: Checkpoint) -> ExpertProfile:
    config = checkpoint.config
    layers = range(config.num_dense_layers, config.num_dense_layers + len(config.moe_layers))
    return measured_profile(
        trace,
        report,
        fingerprint=checkpoint.index.fingerprint,
        layers=layers,
        num_experts=config.num_experts,
    )


def _facts(form: str, ranked: bool, tokens: int, layers: int, requests: int) -> list[tuple[str, str]]:
    order = "ids by rank" if ranked else "ids in no order: all of a token's count alike"
    return [
        ("trace", f"{form}, {order}"),
        ("size", f"{tokens:,} tokens, {layers} layers, {requests:,} requests"),
    ]


def _heading() -> str:
    names = "".join(f"{_NAMES[name]:>9}" for name in POLICIES)
    return f"  {'cycles':>7}{'slots':>9}{names}{'of Belady':>12}"


def _row(row: CapacityRow, num_requests: int) -> str:
    hits = "".join(f"{100 * row.hits[name] / num_requests:>9.1f}" for name in POLICIES)
    share = row.share_of_belady
    return f"  {row.cycles:>7.3g}{row.slots:>9,}{hits}{'-' if share is None else f'{100 * share:.1f} %':>12}"


def _end(report: ReplayReport, screen: Screen) -> None:
    """The ceiling, and whether ours is below a policy that any cache could have."""
    screen.line()
    screen.line(
        f"  at most {share_text(report.ceiling_hits, report.num_requests)} can hit: every expert is read once"
    )
    below = [
        f"{row.cycles:.3g}"
        for row in report.rows
        if row.hits["ours"] < max(row.hits["lru"], row.hits["s3fifo"])
    ]
    if below:
        screen.line(f"  ours hits less than LRU or S3-FIFO at {', '.join(below)} cycles")
    else:
        screen.line("  ours hits at least as often as LRU and S3-FIFO at every capacity")


def _draw(report: ReplayReport, path: Path, screen: Screen, *, quiet: bool) -> None:
    curves = tuple(
        Curve(
            name=_NAMES[name],
            x=tuple(row.cycles for row in report.rows),
            y=tuple(100 * row.hits[name] / report.num_requests for row in report.rows),
        )
        for name in POLICIES
    )
    plot = Plot(title="Expert cache", x_label="slots in token cycles", y_label="hits in %", curves=curves)
    put_plot(plot, path, screen, quiet=quiet)


def put_plot(plot: Plot, path: Path, screen: Screen, *, quiet: bool) -> None:
    """Into the file, or as characters on the screen where matplotlib is not installed."""
    if can_draw():
        draw_plot(plot, path)
        screen.note(f"  plot written to {path}")
        return
    screen.note("  no picture: matplotlib is not installed  (pip install 'twoends[plots]')")
    if not quiet:
        screen.line()
        for line in text_plot(plot):
            screen.line(line)
