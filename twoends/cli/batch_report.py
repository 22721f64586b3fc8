"""What is seen of a batch: a live line, the card at its end, and the object that --json prints."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twoends.cli.report import counted_object, plan_object
from twoends.cli.screen import Screen, plural, progress_bar, share_text
from twoends.engine.open import OpenModel
from twoends.generate.batch import Tally
from twoends.generate.batch_input import BatchInput
from twoends.kernels.choose import Choice
from twoends.units import format_bytes, format_duration

# Where there is no live line, one plain line in so many seconds.
_NOTE_EVERY_S = 10.0
_BAR_CELLS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchReport:
    """The facts of one batch, whole or stopped."""

    model: OpenModel
    source: BatchInput
    output: Path
    num_kept: int
    tally: Tally
    choice: Choice
    policy: str
    peak_bytes: int
    wall_s: float

    @property
    def num_left(self) -> int:
        """Requests that have no answer."""
        return len(self.source) - self.num_kept - self.tally.num_answered - self.tally.num_refused


class BatchLive:
    """Implements generate.batch.BatchProgress on a screen."""

    def __init__(
        self,
        screen: Screen,
        model: OpenModel,
        *,
        num_requests: int,
        num_kept: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._screen, self._model, self._clock = screen, model, clock
        self._num_requests, self._num_kept = num_requests, num_kept
        self._text = f"0 of {num_requests:,} answered"
        self._share = 0.0
        self._noted = clock()

    def layer(self, done: int) -> None:
        """A layer is finished."""
        layers = f"layer {done}/{self._model.config.num_layers}"
        self._screen.live(f"  {progress_bar(self._share, _BAR_CELLS)} {self._text}   {layers}")

    def end_pass(self, tally: Tally, running: int) -> None:
        """A pass has gone through."""
        done = self._num_kept + tally.num_answered + tally.num_refused
        self._share = done / self._num_requests
        read = format_bytes(self._model.counters.bytes_read)
        self._text = (
            f"{done:,} of {self._num_requests:,} answered   {running} at work   "
            f"{tally.num_rows / tally.num_passes:.1f} rows a pass   {read} read"
        )
        now = self._clock()
        if not self._screen.is_live and now - self._noted >= _NOTE_EVERY_S:
            self._noted = now
            self._screen.note(f"  {self._text}")


def batch_object(report: BatchReport) -> dict[str, Any]:
    """What --json prints. Sizes in bytes, times in seconds."""
    model, tally, counters = report.model, report.tally, report.model.counters
    return {
        "model": str(model.checkpoint.directory),
        "fingerprint": model.checkpoint.index.fingerprint,
        "input": str(report.source.path),
        "output": str(report.output),
        "num_requests": len(report.source),
        "num_kept": report.num_kept,
        "num_answered": tally.num_answered,
        "num_refused": tally.num_refused,
        "num_left": report.num_left,
        "prompt_tokens": tally.prompt_tokens,
        "new_tokens": tally.new_tokens,
        "num_sequences": model.plan.num_sequences,
        "num_passes": tally.num_passes,
        "num_rows": tally.num_rows,
        "rows_per_pass": tally.num_rows / tally.num_passes if tally.num_passes else None,
        "bytes_per_new_token": counters.bytes_read / tally.new_tokens if tally.new_tokens else None,
        "bytes_per_row": counters.bytes_read / tally.num_rows if tally.num_rows else None,
        "ram_bytes": model.plan.ram_bytes,
        "peak_rss_bytes": report.peak_bytes,
        "held_bytes": model.held_bytes,
        "plan": plan_object(model.plan),
        **counted_object(counters),
        "policy": report.policy,
        "wait_s": counters.wait_s,
        "reading_s": counters.reading_s,
        "wall_s": report.wall_s,
        "kernels": {
            "backend": report.choice.ops.backend,
            "isa": report.choice.isa,
            "threads": report.choice.threads,
        },
    }


def draw_card(report: BatchReport, screen: Screen) -> None:
    """The end card: what was answered, and what a token took."""
    tally, counters, plan = report.tally, report.model.counters, report.model.plan
    screen.clear_live()
    rows = [
        ("answered", _answered(report)),
        (
            "passes",
            f"{tally.num_passes:,}, {_mean(tally.num_rows, tally.num_passes)} rows each, "
            f"{plural(plan.num_sequences, 'sequence')} at most",
        ),
        (
            "tokens",
            f"{tally.prompt_tokens:,} of prompts, {tally.new_tokens:,} new, "
            f"in {format_duration(report.wall_s)}",
        ),
        ("read", _read(report)),
        (
            "experts",
            f"{counters.expert_requests:,} asked, {counters.expert_hits:,} already here "
            f"({share_text(counters.expert_hits, counters.expert_requests)})",
        ),
        ("memory", f"{format_bytes(report.peak_bytes)} at most, of {format_bytes(plan.ram_bytes)}"),
        ("answers", str(report.output)),
    ]
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        screen.note(f"  {name:<{width}}   {text}")


def _answered(report: BatchReport) -> str:
    parts = [f"{report.tally.num_answered:,} of {plural(len(report.source), 'request')}"]
    if report.tally.num_refused:
        parts.append(f"{report.tally.num_refused:,} refused, each with its reason")
    if report.num_kept:
        parts.append(f"{report.num_kept:,} were there before")
    return "; ".join(parts)


def _read(report: BatchReport) -> str:
    read, tokens = report.model.counters.bytes_read, report.tally.new_tokens
    each = f"   {format_bytes(round(read / tokens))} a new token" if tokens else ""
    return f"{format_bytes(read)}{each}"


def _mean(total: int, count: int) -> str:
    return f"{total / count:.1f}" if count else "0"
