"""The screen of `twoends bench ladder`: the machine, whether a limit holds, a row per rung, a verdict."""

from __future__ import annotations

import json
from pathlib import Path

from twoends.bench.ladder import Job, LadderReport, RungRow, climb
from twoends.bench.limits import Cap, try_cap
from twoends.bench.machine import machine
from twoends.bench.page_cache import can_evict
from twoends.bench.plots import Curve, Plot, check_target
from twoends.bench.report import Spread
from twoends.cli.bench_replay import put_plot
from twoends.cli.command import Values
from twoends.cli.screen import Screen, facts, plural
from twoends.engine.open import Checkpoint
from twoends.errors import NotSound, OptionError, TwoendsError
from twoends.units import format_bytes

_PROMPT = (1, 2, 3, 4, 5, 6, 7, 8)
_CAPS: dict[Cap, str] = {
    "cgroup": "a memory cgroup of the run's own: page cache and kernel memory count",
    "rlimit": "RLIMIT_DATA: private memory counts, touched or not",
    "none": "NONE, as asked: nothing keeps a run within its budget but twoends itself",
}


def show_ladder(values: Values, screen: Screen) -> None:
    """`twoends bench ladder MODEL`. Raises NotSound if any id or bit differs, or a run was killed."""
    job, out = job_of(values), values.out or Path("ladder.json")
    _check_places(values, out)
    card = machine(directory=job.model)
    if not values.json:
        for line in facts(card.rows()):
            screen.line(line)
    cap = choose_cap(values.cap)
    if not values.json:
        for line in facts([("limit", f"{_CAPS[cap]}{'' if cap == 'none' else '; tried, and it holds'}")]):
            screen.line(line)
        screen.line()
        screen.line(_HEADING)
    first: list[RungRow] = []

    def row_done(row: RungRow) -> None:
        if row.trouble is None and not first:
            first.append(row)
        if not values.json:
            screen.line(_line(row, is_first=row in first))

    rows = climb(job, values.rungs, cap=cap, repeat=values.repeat, row_done=row_done)
    report = LadderReport(machine=card, cap=cap, job=job, repeat=values.repeat, rows=rows)
    text = json.dumps(report.as_json(), indent=1)
    out.write_text(text + "\n")
    if values.json:
        screen.line(json.dumps(report.as_json()))
    else:
        screen.line()
        for line in _verdict(report):
            screen.line(f"  {line}")
        screen.line(f"  written to {out}")
    if values.plot is not None and report.done:
        put_plot(_plot(report), values.plot, screen, quiet=values.json)
    _raise_what_is_unsound(report)


def choose_cap(asked: str) -> Cap:
    """The limit that is asked for, after it was seen to hold; `auto` takes the first that does."""
    if asked == "none":
        return "none"
    every: tuple[Cap, ...] = ("cgroup", "rlimit")
    kinds = [cap for cap in every if asked in (cap, "auto")]
    reasons: list[tuple[str, str]] = []
    for cap in kinds:
        reason = try_cap(cap)
        if reason is None:
            return cap
        reasons.append((cap, reason))
    raise TwoendsError(
        "no memory limit can be enforced here, so this would be a table of runs without limits.",
        evidence=reasons,
        remedies=["Run it where a memory cgroup can be made, or say that none is wanted:  --cap none"],
    )


def job_of(values: Values) -> Job:
    """What is run on every rung. Raises OptionError and what opening a checkpoint raises."""
    checkpoint = Checkpoint.open(Path(values.object))
    if not values.rungs or len(values.rungs) < 2:
        raise OptionError("a ladder needs two rungs at least:  --rungs 200MB,400MB")
    ids = tuple(values.ids or _PROMPT)
    if max(ids) >= checkpoint.config.vocab_size:
        raise OptionError(
            f"--ids: {max(ids):,} is outside the vocabulary of {checkpoint.config.vocab_size:,}."
        )
    return Job(model=checkpoint.directory, ids=ids, num_new=values.n, threads=values.threads)


def _check_places(values: Values, out: Path) -> None:
    """What would fail after all the runs is refused before them."""
    if values.plot is not None:
        check_target(values.plot)
    if not out.absolute().parent.is_dir() or out.is_dir():
        raise OptionError(f"--out: {out} can't be written: there is no such directory, or it is one.")
    if not can_evict():
        raise TwoendsError(
            "this system can't drop files from its page cache; a ladder here would measure memory, not disk."
        )


def _columns(*cells: str) -> str:
    """A rung on a line of 80 columns."""
    widths = (7, 7, 6, 17, 7, 4, 7)
    return (
        "  "
        + " ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=False))
        + f" {cells[-1]}"
    )


_HEADING = _columns("budget", "window", "slots", "a token", "read", "hits", "peak", "ids")


def _line(row: RungRow, *, is_first: bool) -> str:
    if row.trouble is not None:
        # The sentence's first half has both numbers or the cause; the rest is in the result file.
        said = row.trouble.split(";")[0]
        what = "below the floor" if row.is_below_floor else "FAILED"
        return f"  {size_text(row.ram_bytes):>7} {what}: {said}"[:80]
    peak = row.peak_bytes if row.group_peak_bytes is None else row.group_peak_bytes
    return _columns(
        size_text(row.ram_bytes),
        size_text(row.window_bytes) if row.window_bytes else "whole",
        f"{row.slots:,}",
        "-" if row.token_s is None else _time_text(row.token_s),
        size_text(row.read_bytes_per_pass),
        "-" if row.hit_share is None else f"{100 * row.hit_share:.0f}%",
        size_text(peak),
        _ids_text(row, is_first=is_first),
    )


def _time_text(spread: Spread) -> str:
    """ "32.7s (31.9-33.4)", or in milliseconds."""
    unit, factor = ("s", 1) if spread.median >= 1 else ("ms", 1000)
    low, median, high = (f"{_three(value * factor)}" for value in (spread.low, spread.median, spread.high))
    return f"{median}{unit} ({low}-{high})"


def _three(value: float) -> str:
    """Three digits, never in powers of ten."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _ids_text(row: RungRow, *, is_first: bool) -> str:
    if row.differs_at is not None:
        return f"DIFFERENT at {row.differs_at + 1}"
    if row.logits_differ:
        return "DIFFERENT logits"
    return row.ids_digest if is_first else "same"


def size_text(num_bytes: float) -> str:
    """Three digits and a unit: a rung is a line."""
    unit, factor = ("GB", 1e9) if num_bytes >= 999.5e6 else ("MB", 1e6)
    return f"{_three(num_bytes / factor)} {unit}"


def _verdict(report: LadderReport) -> list[str]:
    """The claim in words, and the digest by which another machine can be compared."""
    done, runs = report.done, sum(row.runs for row in report.rows)
    counts = f"{plural(len(done), 'rung')}, {plural(runs, 'run')}"
    if not done:
        return [f"{counts}: no rung gave a text."]
    if report.num_different:
        return [
            f"{counts}: {plural(report.num_different, 'rung')} gave other ids or logits. The claim FAILS."
        ]
    lines = [
        f"{counts}: every run gave the same {report.job.num_new} ids.",
        "Memory bought time, and only time.",
        f"ids {done[0].ids_digest}   logits b2:{done[0].logits_digest[:8]}",
    ]
    if any(row.cached_bytes for row in done):
        most = max(row.cached_bytes for row in done)
        lines.append(
            f"Up to {format_bytes(most)} of the model stayed in the page cache: times may be too good."
        )
    return lines


def _plot(report: LadderReport) -> Plot:
    rows = [row for row in report.done if row.token_s is not None]
    spreads = [row.token_s for row in rows if row.token_s is not None]
    curve = Curve(
        name="seconds per token",
        x=tuple(row.ram_bytes / 1e6 for row in rows),
        y=tuple(spread.median for spread in spreads),
        low=tuple(spread.low for spread in spreads),
        high=tuple(spread.high for spread in spreads),
    )
    return Plot(title=report.job.model.name, x_label="budget in MB", y_label="s/token", curves=(curve,))


def _raise_what_is_unsound(report: LadderReport) -> None:
    killed = [row for row in report.rows if row.was_killed]
    if report.num_different or killed:
        what = "ids or logits differ" if report.num_different else "a run took more than its budget"
        raise NotSound(
            f"{what} on {report.num_different or len(killed)} of {plural(len(report.rows), 'rung')}.",
            evidence=[
                (size_text(row.ram_bytes), row.trouble or _ids_text(row, is_first=False))
                for row in report.rows
                if row.was_killed or row.differs_at is not None or row.logits_differ
            ],
            remedies=[
                "This is a defect in twoends, or in this machine's memory. Report it with the result file."
            ],
        )
    failed = [row for row in report.rows if row.trouble is not None and not row.is_below_floor]
    if failed:
        raise TwoendsError(
            f"{plural(len(failed), 'rung')} of {len(report.rows)} failed.",
            evidence=[(size_text(row.ram_bytes), row.trouble or "") for row in failed],
        )
