"""The report of `twoends size` in characters: lines, tables, and whose the figures are."""

from __future__ import annotations

import textwrap

from twoends.cli.screen import COLUMNS, Screen, columns
from twoends.sizing.evidence import Figure
from twoends.sizing.report import Cell, Report, Section, Table, mark

_NAME, _VALUE, _MARK = 29, 22, 3
_LEAST_HEADING = 8


def draw(report: Report, screen: Screen) -> None:
    """Everything, 80 columns wide; the last line says what to do next."""
    screen.line(f"{screen.paint(report.title, 'bold')}   {report.subtitle}")
    sources = report.sources()
    for section in report.sections:
        screen.line()
        screen.line(screen.paint(section.title, "bold"))
        for line in _section_lines(section, sources):
            screen.line(line)
    screen.line()
    screen.line("  a arithmetic (how: --json, --html), m measured, r reported, by:")
    for i, source in enumerate(sources):
        for line in _hung(f"{i + 1:>2}  ", source):
            screen.line(line)
    screen.line()
    screen.line("  Next:  --html FILE for a page with plots, --example for a published example")


def _section_lines(section: Section, sources: tuple[str, ...]) -> list[str]:
    lines = []
    for row in section.lines:
        head = f"  {row.name:<{_NAME}}{row.figure.text:>{_VALUE}} {mark(row.figure, sources):<{_MARK}}"
        room = COLUMNS - len(head) - 1
        pieces = textwrap.wrap(row.remark, room) or [""]
        lines.append(f"{head} {pieces[0]}".rstrip())
        lines += [" " * (len(head) + 1) + piece for piece in pieces[1:]]
    for table in section.tables:
        lines += ["", *_hung("", table.title), *table_lines(table, sources)]
    if section.notes:
        lines.append("")
    for note in section.notes:
        lines += _hung("", note)
    return lines


def table_lines(table: Table, sources: tuple[str, ...]) -> list[str]:
    """Headings in as many lines as their columns' widths ask for; a mark that all share stands there."""
    shared = [_shared_mark([row[i] for row in table.rows], sources) for i in range(len(table.columns))]
    unit = _shared_unit(table)
    body = [[_text(cell, shared[i], unit, sources) for i, cell in enumerate(row)] for row in table.rows]
    headings = [
        _heading(name, sign, i, body)
        for i, (name, sign) in enumerate(zip(table.columns, shared, strict=True))
    ]
    height = max(len(lines) for lines in headings)
    rows = [
        [lines[k - height + len(lines)] if k >= height - len(lines) else "" for lines in headings]
        for k in range(height)
    ]
    figures = [i for i in range(len(table.columns)) if any(isinstance(row[i], Figure) for row in table.rows)]
    return columns([*rows, *body], right=figures, indent=4)


def _heading(name: str, sign: str, i: int, body: list[list[str]]) -> list[str]:
    width = max((len(row[i]) for row in body), default=0)
    text = f"{name} {sign}".strip()
    longest = max((len(word) for word in text.split()), default=1)
    return textwrap.wrap(text, max(width, longest, _LEAST_HEADING)) or [""]


def _shared_mark(cells: list[Cell], sources: tuple[str, ...]) -> str:
    """The mark of a whole column, "" where its cells differ or are texts."""
    marks = {mark(cell, sources) for cell in cells if isinstance(cell, Figure)}
    return marks.pop() if len(marks) == 1 else ""


def _shared_unit(table: Table) -> str:
    """What every figure of a wide table ends with: it is said in the title and left out of the cells."""
    units = {cell.unit for row in table.rows for cell in row if isinstance(cell, Figure)}
    return " tokens/s" if units == {"tokens/s"} and len(table.columns) > 4 else ""


def _text(cell: Cell, shared: str, unit: str, sources: tuple[str, ...]) -> str:
    if not isinstance(cell, Figure):
        return cell
    text = cell.text.removesuffix(unit) if unit else cell.text
    return text if shared else f"{text} {mark(cell, sources)}"


def _hung(begin: str, text: str) -> list[str]:
    """Wrapped text whose later lines stand under the first."""
    indent = "  " + " " * len(begin)
    return textwrap.wrap(text, COLUMNS, initial_indent=f"  {begin}", subsequent_indent=indent)
