"""Curves of a run, for its report and its model card: a table in Markdown and drawings in SVG."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

_WIDTH, _HEIGHT = 640, 280
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 16, 36
_SMOOTH = 20


def read_losses(path: Path) -> list[dict[str, Any]]:
    """The records of a run's loss.jsonl."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def smoothed(values: Sequence[float], *, over: int = _SMOOTH) -> list[float]:
    """Mean of each value and up to `over` - 1 before it."""
    means = []
    for i in range(len(values)):
        window = values[max(0, i + 1 - over) : i + 1]
        means.append(sum(window) / len(window))
    return means


def table(records: Sequence[dict[str, Any]], *, rows: int, tokens_per_step: int) -> str:
    """About `rows` evenly spaced steps: tokens seen, loss and bits per byte (means of 20 steps), balance."""
    loss = smoothed([r["loss_nats"] for r in records])
    bits = smoothed([r["bits_per_byte"] for r in records])
    violation = smoothed([r["max_violation"] for r in records])
    every = max(1, len(records) // rows)
    picked = sorted({0, *range(every - 1, len(records), every), len(records) - 1})
    lines = ["| step | tokens | loss, nats | bits per byte | router maxvio |", "|---:|---:|---:|---:|---:|"]
    for i in picked:
        step = records[i]["step"]
        tokens = step * tokens_per_step
        lines.append(f"| {step:,} | {tokens:,} | {loss[i]:.3f} | {bits[i]:.3f} | {violation[i]:.2f} |")
    return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of a drawing; `y` belongs to `x` in order."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    colour: str
    width: float = 1.6


def svg(records: Sequence[dict[str, Any]], *, title: str) -> str:
    """Loss in nats over steps: every step in grey, the mean of 20 in blue, the loss axis logarithmic."""
    steps, raw = [r["step"] for r in records], [float(r["loss_nats"]) for r in records]
    lines = [
        Line(name="each step", x=steps, y=raw, colour="#c8c8c8", width=0.6),
        Line(name="mean of 20", x=steps, y=smoothed(raw), colour="#1f5fbf"),
    ]
    return drawing(lines, title=title, logarithmic=True)


def drawing(lines: Sequence[Line], *, title: str, logarithmic: bool) -> str:
    """Lines over steps, from 0 to the last. Values that a logarithm can't take are left out."""
    kept = [(line, _points(line, logarithmic)) for line in lines]
    values = [y for _, points in kept for _, y in points]
    last = max((x for _, points in kept for x, _ in points), default=1) or 1
    low, high = _span(values, logarithmic)

    def place(step: float, value: float) -> tuple[float, float]:
        height = (math.log(value) if logarithmic else value) - low
        x = _LEFT + (_WIDTH - _LEFT - _RIGHT) * step / last
        return x, _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * height / (high - low)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        'font-size="11">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#fff"/>',
    ]
    for value in _marks(low, high, logarithmic):
        y = place(0, value)[1]
        parts.append(f'<text x="{_LEFT - 6}" y="{y:.1f}" text-anchor="end" dy="4">{value:g}</text>')
        parts.append(f'<path d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}" stroke="#eee"/>')
    for line, points in kept:
        joined = " ".join("{:.1f},{:.1f}".format(*place(x, y)) for x, y in points)
        parts.append(
            f'<polyline fill="none" stroke="{line.colour}" stroke-width="{line.width}" points="{joined}"/>'
        )
    parts += [_legend(lines), *_steps(last)]
    parts.append(
        f'<text x="{_WIDTH // 2}" y="{_HEIGHT - 5}" text-anchor="middle">{escape(title)}</text></svg>'
    )
    return "\n".join(parts) + "\n"


def _points(line: Line, logarithmic: bool) -> list[tuple[float, float]]:
    pairs = zip(line.x, line.y, strict=True)
    return [(x, y) for x, y in pairs if math.isfinite(y) and (y > 0 or not logarithmic)]


def _span(values: Sequence[float], logarithmic: bool) -> tuple[float, float]:
    """The ends of the axis: a little beyond the values, never the same."""
    if not values:
        return 0.0, 1.0
    if logarithmic:
        return math.log(min(values) * 0.97), math.log(max(values) * 1.03)
    low, high = min(0.0, *values), max(0.0, *values)
    return low, high + 0.05 * (high - low or 1.0)


def _marks(low: float, high: float, logarithmic: bool) -> list[float]:
    """Round numbers inside the axis, 3 to 8 of them where there is room."""
    if logarithmic:
        tens = range(math.floor(low / math.log(10)) - 1, math.ceil(high / math.log(10)) + 1)
        every = [digit * 10.0**ten for ten in tens for digit in (1, 1.5, 2, 3, 4, 6, 8)]
        return [value for value in every if low <= math.log(value) <= high]
    step = 10.0 ** math.floor(math.log10(high - low))
    while (high - low) / step < 3:
        step /= 2
    return [i * step for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _legend(lines: Sequence[Line]) -> str:
    if len(lines) < 2:
        return ""
    spans = "".join(f'<tspan fill="{line.colour}" dx="10">{escape(line.name)}</tspan>' for line in lines)
    return f'<text x="{_WIDTH - _RIGHT}" y="{_TOP + 8}" text-anchor="end">{spans}</text>'


def _steps(last: float) -> list[str]:
    """The numbers below the drawing."""
    marks = []
    for quarter in range(5):
        x = _LEFT + (_WIDTH - _LEFT - _RIGHT) * quarter / 4
        marks.append(
            f'<text x="{x:.1f}" y="{_HEIGHT - 20}" text-anchor="middle">{round(last * quarter / 4):,}</text>'
        )
    return marks
