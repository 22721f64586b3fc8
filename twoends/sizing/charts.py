"""Charts as SVG text: logarithmic axes, a few curves, colours by class so that a page's theme sets them."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

from twoends.sizing.report import Chart, Series
from twoends.units import format_bytes, format_duration

_WIDTH, _HEIGHT = 640, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 78, 14, 12, 46
_MOST_TICKS = 9
# Classes c1 to c7; more curves than that would not be told apart.
_COLOURS = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class _Axis:
    """A logarithmic scale from `low` to `high`, drawn from `begin` to `end`."""

    low: float
    high: float
    begin: float
    end: float

    def at(self, value: float) -> float:
        """Where a value lies."""
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return self.begin + share * (self.end - self.begin)


def svg(chart: Chart) -> str:
    """One chart with its legend below; "" where there is nothing to draw."""
    points = [point for series in chart.series for point in series.points if point[0] > 0 and point[1] > 0]
    if not points:
        return ""
    x = _axis([p[0] for p in points], begin=_LEFT, end=_WIDTH - _RIGHT)
    y = _axis([p[1] for p in points], begin=_HEIGHT - _BOTTOM, end=_TOP)
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{html.escape(chart.title)}">',
        *_grid(chart, x, y),
        *(_curve(series, i, x, y, chart) for i, series in enumerate(chart.series)),
        "</svg>",
    ]
    return "\n".join([*parts, _legend(chart.series)])


def _axis(values: Sequence[float], *, begin: float, end: float) -> _Axis:
    """A little wider than the values; at least a factor of two."""
    low, high = min(values), max(values)
    if high < 2 * low:
        low, high = low / 1.5, high * 1.5
    margin = (high / low) ** 0.04
    return _Axis(low=low / margin, high=high * margin, begin=begin, end=end)


def ticks(low: float, high: float) -> list[float]:
    """Round numbers between, at most nine: 1, 2, 5 of each decade, or fewer."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for steps in ((1, 2, 5), (1, 3), (1,)):
        found = [m * 10.0**e for e in range(first, last + 1) for m in steps]
        inside = [value for value in found if low <= value <= high]
        if len(inside) <= _MOST_TICKS:
            return inside
    every = -(-len(inside) // _MOST_TICKS)
    return inside[::every]


def tick_text(value: float, unit: str) -> str:
    """A round value without needless digits."""
    if unit == "bytes":
        return format_bytes(value).replace(".00", "").replace(".0", "")
    if unit == "s":
        return format_duration(value)
    return f"{value:,.0f}" if value >= 1 else f"{value:g}"


def _grid(chart: Chart, x: _Axis, y: _Axis) -> list[str]:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    lines = []
    for value in ticks(x.low, x.high):
        at = f"{x.at(value):.1f}"
        lines.append(f'<line class="grid" x1="{at}" y1="{_TOP}" x2="{at}" y2="{bottom}"/>')
        label = tick_text(value, chart.x_unit)
        lines.append(f'<text class="tick" x="{at}" y="{bottom + 16}" text-anchor="middle">{label}</text>')
    for value in ticks(y.low, y.high):
        at = f"{y.at(value):.1f}"
        lines.append(f'<line class="grid" x1="{_LEFT}" y1="{at}" x2="{right}" y2="{at}"/>')
        label = tick_text(value, chart.y_unit)
        lines.append(f'<text class="tick" x="{_LEFT - 7}" y="{at}" dy="4" text-anchor="end">{label}</text>')
    middle, centre = (_LEFT + right) / 2, (_TOP + bottom) / 2
    x_label, y_label = html.escape(chart.x_label), html.escape(chart.y_label)
    lines.append(f'<text class="label" x="{middle}" y="{_HEIGHT - 8}" text-anchor="middle">{x_label}</text>')
    turned = f'transform="translate(14 {centre}) rotate(-90)"'
    lines.append(f'<text class="label" {turned} text-anchor="middle">{y_label}</text>')
    return lines


def _curve(series: Series, i: int, x: _Axis, y: _Axis, chart: Chart) -> str:
    """A line, and a dot with its figures where it is not a mere level."""
    colour = f"c{i % _COLOURS + 1}"
    places = [(x.at(px), y.at(py), px, py) for px, py in series.points if px > 0 and py > 0]
    path = " ".join(f"{px:.1f},{py:.1f}" for px, py, _, _ in places)
    dashed = " dashed" if series.dashed else ""
    parts = [f'<polyline class="curve {colour}{dashed}" points="{path}"/>']
    if len(places) > 2 or not series.dashed:
        for px, py, value_x, value_y in places:
            text = f"{series.name}: {tick_text(value_x, chart.x_unit)}, {_value_text(value_y, chart.y_unit)}"
            title = f"<title>{html.escape(text)}</title>"
            parts.append(f'<circle class="dot {colour}" cx="{px:.1f}" cy="{py:.1f}" r="3.5">{title}</circle>')
    return "\n".join(parts)


def _value_text(value: float, unit: str) -> str:
    if unit == "tokens/s":
        return f"{value:,.0f} tokens/s" if value >= 100 else f"{value:.3g} tokens/s"
    return format_bytes(value) if unit == "bytes" else tick_text(value, unit)


def _legend(series: Sequence[Series]) -> str:
    items = []
    for i, one in enumerate(series):
        dashed = " dashed" if one.dashed else ""
        sample = f'<svg class="sample" viewBox="0 0 26 8"><line class="curve c{i % _COLOURS + 1}{dashed}" '
        sample += 'x1="1" y1="4" x2="25" y2="4"/></svg>'
        items.append(f"<li>{sample}{html.escape(one.name)}</li>")
    return f'<ul class="legend">{"".join(items)}</ul>'
