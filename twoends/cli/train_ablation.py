"""`twoends train --ablation`: every cell as a run of its own, several at once, resumable; then the table."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from twoends.cli.command import Values
from twoends.cli.screen import Screen, plural
from twoends.cli.stop import StopSignals
from twoends.cli.train_text import corpus_of, recipe_of
from twoends.errors import TwoendsError
from twoends.train.ablation import SEEDS, Cell, all_cells, cell_recipe, read_result, tables
from twoends.train.recipe import Recipe, recipe_text
from twoends.units import format_duration

TABLE = "ablation.md"
_LOOK_EVERY_S = 0.5


def ablation(values: Values, screen: Screen) -> None:
    """`twoends train --ablation`. Raises TwoendsError for a cell that fails."""
    out = Path(values.out)
    base = recipe_of(values, default="ablation")
    cells = all_cells(values.cells)
    data = corpus_of(values, base, screen)
    out.mkdir(parents=True, exist_ok=True)
    until = float("inf") if values.minutes is None else time.monotonic() + values.minutes * 60
    waiting = [cell for cell in cells if read_result(out, cell) is None]
    screen.note(f"  {plural(len(cells), 'run')}, {len(cells) - len(waiting)} of them done before")
    _share_vocabulary(base, data, out)
    with StopSignals(screen, unit="step of each run") as signals:
        _work(
            waiting,
            start=lambda cell: _start(cell, base, values, data=data, out=out),
            jobs=values.jobs or len(os.sched_getaffinity(0)),
            should_stop=lambda: signals.asked or time.monotonic() >= until,
            screen=screen,
        )
    text = tables(out, seeds=SEEDS)
    (out / TABLE).write_text(text, encoding="utf-8")
    left = [cell.folder for cell in cells if read_result(out, cell) is None]
    if values.json:
        found = {c.folder: read_result(out, c) for c in cells}
        screen.line(json.dumps({"left": left, "cells": found}))
        return
    screen.line(text)
    if left:
        screen.line(f"  {plural(len(left), 'run')} left: the same command goes on")


def _share_vocabulary(base: Recipe, data: Path, out: Path) -> None:
    """Learn the ranks once: bits per byte of different vocabularies would not compare."""
    from twoends.train.prepare import learn_ranks

    learn_ranks(base, corpus_dir=data, path=out / "tiktoken.model")


def _start(cell: Cell, base: Recipe, values: Values, *, data: Path, out: Path) -> subprocess.Popen[str]:
    """The run of one cell, from its snapshot if it has one."""
    folder = out / cell.folder
    folder.mkdir(exist_ok=True)
    recipe = cell_recipe(base, cell)
    shared = dataclasses.replace(recipe.tokenizer, file=str((out / "tiktoken.model").resolve()))
    path = folder / "recipe.toml"
    path.write_text(recipe_text(dataclasses.replace(recipe, tokenizer=shared)), encoding="utf-8")
    words = [sys.executable, "-m", "twoends", "train", str(path), "--out", str(folder), "--data", str(data)]
    words += ["--threads", "1", "--json"]
    if list(folder.glob("snapshots/step-*/whole.json")):
        words.append("--resume")
    # Its own session: Ctrl-C comes from here, so that it is asked once.
    with (folder / "log.txt").open("a", encoding="utf-8") as log:
        return subprocess.Popen(
            words, stdout=subprocess.DEVNULL, stderr=log, text=True, start_new_session=True
        )


def _work(waiting: list[Cell], *, start: Any, jobs: int, should_stop: Any, screen: Screen) -> None:
    """Up to `jobs` runs at once until none waits or a stop is asked, which each run is then told of."""
    running: dict[Cell, tuple[subprocess.Popen[str], float]] = {}
    waiting = list(waiting)
    try:
        while running or (waiting and not should_stop()):
            while waiting and len(running) < jobs and not should_stop():
                cell = waiting.pop(0)
                running[cell] = (start(cell), time.monotonic())
            if should_stop():
                for process, _ in running.values():
                    process.terminate()
                waiting.clear()
                for process, _ in running.values():
                    process.wait()
            for cell, (process, began_s) in list(running.items()):
                if process.poll() is not None:
                    del running[cell]
                    _tell(cell, process.returncode, time.monotonic() - began_s, screen)
            screen.live(f"  {', '.join(cell.folder for cell in running)}; {len(waiting)} waiting")
            time.sleep(_LOOK_EVERY_S)
    finally:
        for process, _ in running.values():
            process.terminate()
        screen.clear_live()


def _tell(cell: Cell, code: int, took_s: float, screen: Screen) -> None:
    if code != 0:
        raise TwoendsError(
            f"the run {cell.folder} failed with exit code {code}.",
            evidence=[("what it said", f"{cell.folder}/log.txt")],
            remedies=["The same command goes on with the runs that are left."],
        )
    screen.note(f"  {cell.folder}: {format_duration(took_s)}")
