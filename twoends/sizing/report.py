"""A report as data: sections of lines and tables, every number a Figure. Screens, JSON and pages draw it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from twoends.sizing.evidence import Figure
from twoends.sizing.links import CoreRate
from twoends.sizing.machines import Machine, MachineTable
from twoends.sizing.models import SizedModel
from twoends.sizing.money import Mix, Owning
from twoends.sizing.prices import Money, PriceTable
from twoends.sizing.routing import Rows

Cell = str | Figure


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What was asked: a model, where it would run, under which load, and what an hour costs."""

    model: SizedModel
    machine: Machine | None
    rows: Rows
    context_tokens: int
    core: CoreRate
    experts_as: str | None
    machines: MachineTable
    prices: PriceTable
    rent: Money | None
    mix: Mix
    utilisation: float
    tokens_per_s: float | None
    owning: Owning | None
    currency: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One named figure; `key` is its name in JSON."""

    key: str
    name: str
    figure: Figure
    remark: str = ""

    def as_object(self) -> dict[str, Any]:
        """For JSON."""
        return {"name": self.name, **self.figure.as_object(), "remark": self.remark}


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of cells under headings; the first column is a label."""

    key: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]

    def as_object(self) -> dict[str, Any]:
        """For JSON: a list of objects by heading."""
        return {
            "title": self.title,
            "rows": [dict(zip(self.columns, map(_cell_object, row), strict=True)) for row in self.rows],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One curve of a chart; `dashed` for a level or a comparison."""

    name: str
    points: tuple[tuple[float, float], ...]
    dashed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Curves over logarithmic axes. `x_unit`, `y_unit` say how ticks are written: bytes, s, tokens/s, ""."""

    key: str
    title: str
    about: str
    x_label: str
    y_label: str
    x_unit: str
    y_unit: str
    series: tuple[Series, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One part of the report; `notes` are sentences without figures of their own."""

    key: str
    title: str
    lines: tuple[Line, ...] = ()
    tables: tuple[Table, ...] = ()
    charts: tuple[Chart, ...] = ()
    notes: tuple[str, ...] = ()

    def as_object(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "title": self.title,
            **{line.key: line.as_object() for line in self.lines},
            **{table.key: table.as_object() for table in self.tables},
            "notes": list(self.notes),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All sections about one model."""

    title: str
    subtitle: str
    sections: tuple[Section, ...]

    def as_object(self) -> dict[str, Any]:
        """For JSON. Charts repeat what tables say and are left out."""
        sections = {section.key: section.as_object() for section in self.sections}
        return {"title": self.title, "subtitle": self.subtitle, **sections}

    def figures(self) -> Iterator[Figure]:
        """Every figure, in the order of the page."""
        for section in self.sections:
            yield from (line.figure for line in section.lines)
            for table in section.tables:
                yield from (cell for row in table.rows for cell in row if isinstance(cell, Figure))

    def sources(self) -> tuple[str, ...]:
        """Whose the measured and reported figures are, each once, in the order of the page."""
        return tuple(dict.fromkeys(f.source for f in self.figures() if f.kind != "arithmetic"))


def mark(figure: Figure, sources: tuple[str, ...]) -> str:
    """ "a" for arithmetic; "m1", "r2" for what was measured or reported by that source."""
    if figure.kind == "arithmetic":
        return "a"
    return f"{figure.kind[0]}{sources.index(figure.source) + 1}"


def _cell_object(cell: Cell) -> Any:
    return cell.as_object() if isinstance(cell, Figure) else cell
