"""Curves of a bench: a picture where matplotlib is installed, characters where it is not."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from twoends.errors import OptionError

_COLUMNS, _ROWS = 60, 16
_MARKS = "ox+*#@"


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One line of a plot; `low` and `high` span an error bar at each point where they are given."""

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """Curves over one x axis, which is logarithmic: capacities and budgets come in multiples."""

    title: str
    x_label: str
    y_label: str
    curves: tuple[Curve, ...]


def can_draw() -> bool:
    """Whether matplotlib is installed (the extra `plots`)."""
    return importlib.util.find_spec("matplotlib") is not None


def check_target(path: Path) -> None:
    """Raises OptionError for a file that a picture can't go to, before the measurement that fills it."""
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise OptionError(f"--plot: {path.name} must end in .png, .svg or .pdf.")
    if not path.absolute().parent.is_dir():
        raise OptionError(f"--plot: there is no directory {path.absolute().parent}.")


def draw_plot(plot: Plot, path: Path) -> None:
    """Writes the picture. Needs matplotlib; raises OptionError where the file can't be written."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for curve in plot.curves:
        bars = None
        if curve.low:
            below = [y - low for y, low in zip(curve.y, curve.low, strict=True)]
            above = [high - y for y, high in zip(curve.y, curve.high, strict=True)]
            bars = [below, above]
        axes.errorbar(curve.x, curve.y, yerr=bars, marker="o", capsize=3, label=curve.name)
    axes.set(title=plot.title, xlabel=plot.x_label, ylabel=plot.y_label, xscale="log")
    ticks = sorted({x for curve in plot.curves for x in curve.x})
    axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    if len(plot.curves) > 1:
        axes.legend()
    try:
        figure.savefig(path)
    except OSError as error:
        raise OptionError(f"--plot: {path} can't be written: {error.strerror}.") from None


def text_plot(plot: Plot) -> list[str]:
    """The same in characters: one mark per curve, x in steps from point to point."""
    xs = sorted({x for curve in plot.curves for x in curve.x})
    top = max((y for curve in plot.curves for y in curve.y), default=0.0) or 1.0
    place = {x: round(i * (_COLUMNS - 1) / max(len(xs) - 1, 1)) for i, x in enumerate(xs)}
    cells = [[" "] * _COLUMNS for _ in range(_ROWS)]
    for curve, mark in zip(plot.curves, _MARKS, strict=False):
        for x, y in zip(curve.x, curve.y, strict=True):
            cells[_ROWS - 1 - round(y / top * (_ROWS - 1))][place[x]] = mark
    lines = [f"  {plot.y_label}"]
    for i, row in enumerate(cells):
        label = f"{top * (_ROWS - 1 - i) / (_ROWS - 1):.3g}" if i % 5 == 0 else ""
        lines.append(f"  {label:>8} |{''.join(row)}".rstrip())
    lines.append(f"  {'':>8} +{'-' * _COLUMNS}")
    lines.append(f"  {'':>8}  {_x_labels(xs, place)}")
    names = [f"{mark} {curve.name}" for curve, mark in zip(plot.curves, _MARKS, strict=False)]
    return [*lines, f"  {'':>8}  {plot.x_label}", f"  {'':>8}  {'   '.join(names)}"]


def _x_labels(xs: Sequence[float], place: dict[float, int]) -> str:
    """Labels under their points, left out where they would touch."""
    line = ""
    for x in xs:
        label = f"{x:g}"
        at = min(place[x], _COLUMNS - len(label))
        if at >= len(line) + (1 if line else 0):
            line = line.ljust(at) + label
    return line
