"""The ablation table: cells that differ from one recipe in single keys, three seeds each, and what they gave.

A cell is an ordinary run of `twoends train` on a recipe file of its own, so each can be repeated alone.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twoends.errors import OptionError
from twoends.train.recipe import Recipe

SEEDS = (1, 2, 3)
_AS_STORED = "heldout_bits_per_byte_as_stored"
_AS_TRAINED = "heldout_bits_per_byte"

# Cell -> the keys of [train] that it changes. "base" is Per-Head Muon, Quantile Balancing, experts in the
# number form of all products.
CELLS: Mapping[str, Mapping[str, Any]] = {
    "base": {},
    "adamw": {"optimiser": "adamw"},
    "muon": {"optimiser": "muon"},
    "no-balance": {"balance": "none"},
    "sign": {"balance": "sign"},
    "qat": {"expert_weights": "mxfp4"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A line of the table: the cell it comes from, and which figure of it."""

    name: str
    cell: str
    figure: str = _AS_TRAINED


# Each comparison begins with what the others are held against.
TABLES: Mapping[str, tuple[Row, ...]] = {
    "Optimiser": (
        Row(name="AdamW", cell="adamw"),
        Row(name="Muon", cell="muon"),
        Row(name="Per-Head Muon", cell="base"),
    ),
    "Balance": (
        Row(name="none", cell="no-balance"),
        Row(name="sign steps", cell="sign"),
        Row(name="Quantile Balancing", cell="base"),
    ),
    "Experts": (
        Row(name="bf16", cell="base"),
        Row(name="MXFP4 after training", cell="base", figure=_AS_STORED),
        Row(name="MXFP4 in training", cell="qat", figure=_AS_STORED),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One run of the table."""

    name: str
    seed: int

    @property
    def folder(self) -> str:
        """Where it is kept, below the table's folder."""
        return f"{self.name}-{self.seed}"


def all_cells(names: Sequence[str] | None = None, *, seeds: Sequence[int] = SEEDS) -> list[Cell]:
    """Every run, all cells of a seed before the next seed: a table cut short still compares."""
    for name in names or ():
        if name not in CELLS:
            raise OptionError(f"there is no cell {name!r}.", evidence=[("known", ", ".join(CELLS))])
    return [Cell(name=name, seed=seed) for seed in seeds for name in (names or CELLS)]


def cell_recipe(base: Recipe, cell: Cell) -> Recipe:
    """The recipe of one run."""
    return dataclasses.replace(
        base, train=dataclasses.replace(base.train, **CELLS[cell.name], seed=cell.seed)
    )


def read_result(folder: Path, cell: Cell) -> dict[str, Any] | None:
    """What a finished run told; None for one that isn't."""
    path = folder / cell.folder / "result.json"
    if not path.is_file():
        return None
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found if found["complete"] else None


def mean_bits(result: Mapping[str, Any], figure: str) -> float:
    """Held-out bits per byte, the mean over the sources of text."""
    values = list(result[figure].values())
    return float(sum(values) / len(values))


def tables(folder: Path, *, seeds: Sequence[int] = SEEDS) -> str:
    """The three comparisons in Markdown, from what is finished so far."""
    parts = []
    for title, rows in TABLES.items():
        with_balance = title == "Balance"
        head, rule = f"| {title.lower()} | runs | bits per byte | spread |", "|---|---:|---:|---:|"
        if with_balance:
            head, rule = head + " max violation |", rule + "---:|"
        lines, figures = [f"### {title}", "", head, rule], []
        for row in rows:
            results = [
                r for seed in seeds if (r := read_result(folder, Cell(name=row.cell, seed=seed))) is not None
            ]
            bits = [mean_bits(result, row.figure) for result in results]
            figures.append((row.name, bits))
            line = f"| {row.name} | {len(bits)} | {_mean(bits)} | {_spread(bits)} |"
            if with_balance:
                violations = [float(result["max_violation"]) for result in results]
                line += f" {_mean(violations)} +- {_spread(violations)} |"
            lines.append(line)
        parts += [*lines, "", verdict(figures), ""]
    return "\n".join(parts)


def verdict(figures: Sequence[tuple[str, Sequence[float]]]) -> str:
    """What the seeds carry: an order only where every run of one beats every run of another."""
    said = []
    for i, (name, bits) in enumerate(figures):
        for other, theirs in figures[i + 1 :]:
            if min(len(bits), len(theirs)) < 2:
                said.append(f"{name} against {other}: too few runs to say.")
            elif max(bits) < min(theirs):
                said.append(f"{name} is below {other} in every run, by {_gap(theirs, bits)} on average.")
            elif max(theirs) < min(bits):
                said.append(f"{other} is below {name} in every run, by {_gap(bits, theirs)} on average.")
            else:
                said.append(f"{name} and {other} overlap: no difference to be claimed.")
    return " ".join(said)


def _gap(more: Sequence[float], less: Sequence[float]) -> str:
    return f"{sum(more) / len(more) - sum(less) / len(less):.4f}"


def _mean(values: Sequence[float]) -> str:
    return f"{sum(values) / len(values):.4f}" if values else "-"


def _spread(values: Sequence[float]) -> str:
    """Sample standard deviation over the seeds."""
    if len(values) < 2:
        return "-"
    mean = sum(values) / len(values)
    return f"{math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1)):.4f}"
