"""The report of a run: one HTML file with its card, curves and samples, and nothing to fetch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from twoends.train.curve import Line, drawing, smoothed

# One object a line, appended as the run goes; what is in them depends on the machine and its clock.
SPEED, HELDOUT, SAMPLES = "speed.jsonl", "heldout.jsonl", "samples.jsonl"
_COLOURS = ("#1f5fbf", "#bf3f1f", "#2f8f4f", "#7f3fbf", "#8f6f1f", "#3f8f9f")
_GREY = "#c8c8c8"
# More points than this are not to be seen in a drawing.
_POINTS = 800
_STYLE = (
    "body{font-family:sans-serif;max-width:46em;margin:2em auto;padding:0 1em}"
    "td,th{padding:.15em .8em .15em 0;text-align:left;vertical-align:top}pre{background:#f4f4f4;padding:1em;"
    "white-space:pre-wrap}svg{width:100%}"
)


def append_line(path: Path, record: Mapping[str, Any]) -> None:
    """One more record of a run's log."""
    with path.open("a", encoding="ascii") as file:
        file.write(json.dumps(record) + "\n")


def read_lines(path: Path, *, up_to: int) -> list[dict[str, Any]]:
    """The last record of each step up to `up_to`: a resumed run tells some steps again."""
    if not path.is_file():
        return []
    found: dict[int, dict[str, Any]] = {}
    for line in path.read_text(encoding="ascii").splitlines():
        # A killed run may leave half a line.
        if line.endswith("}"):
            record = json.loads(line)
            found[record["step"]] = record
    return [found[step] for step in sorted(found) if step <= up_to]


def report_html(
    out_dir: Path,
    *,
    title: str,
    card: Sequence[tuple[str, str]],
    records: Sequence[dict[str, Any]],
    recipe_text: str,
) -> str:
    """The report of the run in `out_dir`; `records` are those of loss.jsonl, the folder has the rest."""
    last = records[-1]["step"] if records else 0
    speed, heldout, samples = (read_lines(out_dir / name, up_to=last) for name in (SPEED, HELDOUT, SAMPLES))
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in card)
    parts = [
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>',
        f"<style>{_STYLE}</style><h1>{escape(title)}</h1><table>{rows}</table>",
        *_curves(thinned(records), thinned(speed), heldout),
    ]
    if heldout:
        parts += ["<h2>Held-out text</h2>", _heldout_table(heldout)]
    if samples:
        parts.append(
            "<h2>Samples</h2><p>Written by the engine from the exported checkpoint of that step.</p>"
        )
        for record in samples:
            for told in record["samples"]:
                shown = escape(told["prompt"] + told["text"])
                parts.append(f"<p>step {record['step']:,}</p><pre>{shown}</pre>")
    parts.append(f"<h2>Recipe</h2><pre>{escape(recipe_text)}</pre></html>")
    return "\n".join(parts) + "\n"


def thinned(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every n-th record, the last among them, so that a drawing has at most 800 points."""
    every = -(-len(records) // _POINTS) if records else 1
    return [record for i, record in enumerate(records, 1) if i % every == 0 or i == len(records)]


def _curves(
    records: Sequence[dict[str, Any]], speed: Sequence[dict[str, Any]], heldout: Sequence[dict[str, Any]]
) -> list[str]:
    steps = [record["step"] for record in records]

    def of(key: str, name: str, colour: str, *, smooth: bool = False) -> Line:
        values = [float(record[key]) for record in records]
        return Line(name=name, x=steps, y=smoothed(values) if smooth else values, colour=colour)

    violation = [
        of("max_violation", "busiest expert of the worst layer", _COLOURS[0]),
        of("violation_floor", "chance alone", _COLOURS[1]),
    ]
    drawings = [
        ("bits per byte of the training text", [
            of("bits_per_byte", "each step", _GREY),
            of("bits_per_byte", "mean of 20", _COLOURS[0], smooth=True),
        ], True),
        ("max violation: largest load over mean load, minus 1", violation, False),
        ("gradient norm before clipping", [of("gradient_norm", "norm", _COLOURS[0])], True),
        ("learning rate", [of("learning_rate", "rate", _COLOURS[0])], False),
    ]  # fmt: skip
    if any(record["attention_logit"] for record in records):
        logits = [of("attention_logit", "largest", _COLOURS[0])]
        drawings.append(("largest attention logit of the MLA layers", logits, False))
    if len(heldout) > 1:
        sources = [key for key in heldout[-1] if key != "step"]
        lines = [
            Line(name=name, x=[r["step"] for r in heldout], y=[r[name] for r in heldout], colour=colour)
            for name, colour in zip(sources, _COLOURS * len(sources), strict=False)
        ]
        drawings.append(("bits per byte of held-out text", lines, True))
    if speed:
        times = [record["step"] for record in speed]
        rate = Line(name="", x=times, y=[r["tokens_per_s"] for r in speed], colour=_COLOURS[0])
        memory = Line(name="", x=times, y=[r["peak_bytes"] / 1e6 for r in speed], colour=_COLOURS[0])
        drawings += [("tokens per second", [rate], False), ("peak memory in MB", [memory], False)]
    if not records:
        return []
    return [drawing(lines, title=title, logarithmic=log) for title, lines, log in drawings]


def _heldout_table(heldout: Sequence[dict[str, Any]]) -> str:
    last = heldout[-1]
    rows = "".join(
        f"<tr><td>{escape(source)}</td><td>{bits:.3f}</td></tr>"
        for source, bits in last.items()
        if source != "step"
    )
    return f"<table><tr><th>source</th><th>bits per byte at step {last['step']:,}</th></tr>{rows}</table>"
