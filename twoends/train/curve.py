"""The loss curve of a run, for its model card: a table in Markdown and a drawing in SVG."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
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


def svg(records: Sequence[dict[str, Any]], *, title: str) -> str:
    """Loss in nats over steps: every step in grey, the mean of 20 in blue, the loss axis logarithmic."""
    raw = [float(r["loss_nats"]) for r in records]
    low, high = math.log(min(raw) * 0.97), math.log(max(raw) * 1.03)
    last = records[-1]["step"]

    def point(step: int, value: float) -> str:
        x = _LEFT + (_WIDTH - _LEFT - _RIGHT) * step / last
        y = _TOP + (_HEIGHT - _TOP - _BOTTOM) * (high - math.log(value)) / (high - low)
        return f"{x:.1f},{y:.1f}"

    def line(values: Sequence[float], colour: str, width: float) -> str:
        points = " ".join(point(r["step"], value) for r, value in zip(records, values, strict=True))
        return f'<polyline fill="none" stroke="{colour}" stroke-width="{width}" points="{points}"/>'

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        'font-size="11">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#fff"/>',
        line(raw, "#c8c8c8", 0.6),
        line(smoothed(raw), "#1f5fbf", 1.6),
    ]
    for value in (1, 1.5, 2, 3, 4, 6, 8):
        if low <= math.log(value) <= high:
            y = point(0, value).split(",")[1]
            parts.append(f'<text x="{_LEFT - 6}" y="{y}" text-anchor="end" dy="4">{value:g}</text>')
            parts.append(f'<path d="M{_LEFT} {y}H{_WIDTH - _RIGHT}" stroke="#eee"/>')
    for quarter in range(5):
        step = round(last * quarter / 4)
        x = point(step, min(raw)).split(",")[0]
        parts.append(f'<text x="{x}" y="{_HEIGHT - 20}" text-anchor="middle">{step:,}</text>')
    parts.append(f'<text x="{_WIDTH // 2}" y="{_HEIGHT - 5}" text-anchor="middle">{title}</text></svg>')
    return "\n".join(parts) + "\n"
