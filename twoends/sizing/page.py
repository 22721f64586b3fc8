"""The report as one HTML file: no script, no font, no picture from elsewhere; light and dark."""

from __future__ import annotations

import html

from twoends import __version__
from twoends.sizing.charts import svg
from twoends.sizing.evidence import Figure
from twoends.sizing.report import Cell, Chart, Report, Section, Table, mark

# What a reader looks for first: (section, key of its line, words).
_CARDS = (
    ("footprint", "bytes", "released size"),
    ("footprint", "active_parameters", "active parameters"),
    ("bytes", "bytes_per_token", "bytes of one token"),
    ("sequence", "cache_bytes_at_1m", "cache at 1M tokens"),
    ("speed", "tokens_per_s", "speed at best"),
    ("money", "break_even_tokens_per_s", "break-even"),
)

_NUMBER = ' class="n"'

_STYLE = """\
:root { color-scheme: light dark; --ground: #fbfaf7; --card: #ffffff; --ink: #1d2430; --soft: #5d6675;
  --line: #e2dfd7; --grid: #ebe8e1; --accent: #0b5fa5; --c1: #0b6bb8; --c2: #d1541f; --c3: #2b8a4b;
  --c4: #8a4bb0; --c5: #b7860b; --c6: #c2367a; --c7: #4a6572; }
@media (prefers-color-scheme: dark) { :root { --ground: #14171c; --card: #1b2027; --ink: #e8eaee;
  --soft: #9aa4b2; --line: #2c333d; --grid: #262c35; --accent: #6bb6f5; --c1: #58aef2; --c2: #f08b5b;
  --c3: #62c984; --c4: #c18fe0; --c5: #e0b74e; --c6: #ee7fb0; --c7: #93b1bf; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
main { max-width: 68rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
h1 { font-size: 2rem; line-height: 1.15; margin: 0; letter-spacing: -0.02em; }
h2 { font-size: 1.3rem; margin: 3rem 0 0.75rem; padding-top: 1rem; border-top: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 1.5rem 0 0.4rem; font-weight: 600; }
p { margin: 0.4rem 0; color: var(--soft); max-width: 44rem; }
.sub { font-size: 1.05rem; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(15rem, 1fr)); gap: 0.75rem;
  margin: 1.5rem 0 0; padding: 0; list-style: none; }
.cards li { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 0.8rem 1rem; }
.cards b { display: block; font-size: 1.1rem; white-space: nowrap; font-variant-numeric: tabular-nums; }
.cards span { color: var(--soft); font-size: 0.85rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 0.92rem; }
th, td { padding: 0.3rem 1.1rem 0.3rem 0; text-align: left; border-bottom: 1px solid var(--line);
  vertical-align: top; }
th { color: var(--soft); font-weight: 500; }
td.n, th.n { text-align: right; white-space: nowrap; }
td.note { color: var(--soft); }
sup { color: var(--accent); font-size: 0.7em; margin-left: 0.15em; cursor: help; }
figure { margin: 1.25rem 0; background: var(--card); border: 1px solid var(--line); border-radius: 12px;
  padding: 1rem 1rem 0.75rem; max-width: 46rem; }
figcaption { font-weight: 600; } figure p { margin: 0 0 0.5rem; font-size: 0.9rem; }
svg { display: block; width: 100%; height: auto; }
.grid { stroke: var(--grid); stroke-width: 1; } .tick { fill: var(--soft); font-size: 11px; }
.label { fill: var(--soft); font-size: 12px; }
.curve { fill: none; stroke-width: 2.25; stroke-linejoin: round; } .dashed { stroke-dasharray: 6 4; }
.dot { stroke: var(--card); stroke-width: 1.25; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 0.2rem 1.1rem; margin: 0.4rem 0 0;
  padding: 0; font-size: 0.85rem; color: var(--soft); }
.legend li { display: flex; align-items: center; gap: 0.4rem; } .sample { width: 26px; height: 8px; }
ol { padding-left: 1.6rem; font-size: 0.88rem; color: var(--soft); overflow-wrap: anywhere; }
"""


def page(report: Report) -> str:
    """The whole file."""
    sources = report.sources()
    title = html.escape(f"{report.title}: what it needs, how fast, what it costs")
    body = [
        f"<header><h1>{title}</h1>",
        f'<p class="sub">{html.escape(report.subtitle)}</p>',
        "<p>Every figure has a mark: a for arithmetic, m for measured, r for reported; rest on it to read "
        "how, or whose. GB is 10^9 bytes; GiB is said where it is meant.</p>",
        _cards(report),
        "</header>",
        *(_section(section, sources) for section in report.sections),
        _sources(sources),
        f"<p>Made by twoends {__version__} (twoends size --html). Nothing was fetched.</p>",
    ]
    colours = "".join(
        f".c{i} {{ stroke: var(--c{i}); }} .dot.c{i} {{ fill: var(--c{i}); stroke: var(--card); }}\n"
        for i in range(1, 8)
    )
    head = [
        '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{title}</title>",
        f"<style>\n{_STYLE}{colours}</style>",
    ]
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head>',
            *head,
            "</head><body><main>",
            *body,
            "</main></body></html>",
            "",
        ]
    )


def _cards(report: Report) -> str:
    sections = {section.key: section for section in report.sections}
    items = []
    for key, name, words in _CARDS:
        lines = {line.key: line for line in sections[key].lines} if key in sections else {}
        if name in lines:
            items.append(f"<li><b>{html.escape(_short(lines[name].figure))}</b><span>{words}</span></li>")
    return f'<ul class="cards">{"".join(items)}</ul>'


def _short(figure: Figure) -> str:
    """A count of parameters in billions; all else as it is."""
    return f"{figure.value / 1e9:,.1f} billion" if figure.unit == "parameters" else figure.text


def _section(section: Section, sources: tuple[str, ...]) -> str:
    parts = [f'<section id="{section.key}"><h2>{html.escape(section.title)}</h2>']
    if section.lines:
        rows = [
            f"<tr><td>{html.escape(line.name)}</td>{_cell(line.figure, sources)}"
            f'<td class="note">{html.escape(line.remark)}</td></tr>'
            for line in section.lines
        ]
        parts.append(f'<div class="scroll"><table>{"".join(rows)}</table></div>')
    parts += [_chart(chart) for chart in section.charts]
    parts += [_table(table, sources) for table in section.tables]
    parts += [f"<p>{html.escape(note)}</p>" for note in section.notes]
    return "\n".join([*parts, "</section>"])


def _table(table: Table, sources: tuple[str, ...]) -> str:
    if not table.rows:
        return ""
    figures = [any(isinstance(row[i], Figure) for row in table.rows) for i in range(len(table.columns))]
    heads = "".join(
        f"<th{_NUMBER if is_figure else ''}>{html.escape(name)}</th>"
        for name, is_figure in zip(table.columns, figures, strict=True)
    )
    rows = "".join(f"<tr>{''.join(_cell(cell, sources) for cell in row)}</tr>" for row in table.rows)
    grid = f'<div class="scroll"><table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>'
    return f"<h3>{html.escape(table.title)}</h3>{grid}"


def _cell(cell: Cell, sources: tuple[str, ...]) -> str:
    if not isinstance(cell, Figure):
        return f"<td>{html.escape(cell)}</td>"
    how = html.escape(f"{cell.kind}: {cell.source}", quote=True)
    return f'<td class="n">{html.escape(cell.text)}<sup title="{how}">{mark(cell, sources)}</sup></td>'


def _chart(chart: Chart) -> str:
    drawn = svg(chart)
    if not drawn:
        return ""
    words = f"<figcaption>{html.escape(chart.title)}</figcaption><p>{html.escape(chart.about)}</p>"
    return f"<figure>{words}{drawn}</figure>"


def _sources(sources: tuple[str, ...]) -> str:
    items = "".join(f"<li>{html.escape(source)}</li>" for source in sources)
    return (
        f'<section id="sources"><h2>Sources of measured and reported figures</h2><ol>{items}</ol></section>'
    )
