"""The work of `twoends train`, in order: recipe, text, card, steps with snapshots, export, report.

Imports torch; train.py loads it when everything that can be refused without torch was refused.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
import shutil
import time
from pathlib import Path
from typing import Any

import torch

from twoends.cli.command import Values
from twoends.cli.screen import Screen, facts, plural, progress_bar
from twoends.cli.stop import StopSignals
from twoends.cli.train_samples import engine_samples
from twoends.cli.train_text import corpus_of, recipe_of
from twoends.train.events import EventFile
from twoends.train.export import export_checkpoint
from twoends.train.flops import matmul_rate, token_flops
from twoends.train.kda_choice import choose_kda
from twoends.train.loop import Progress, Run, train, write_text_atomically
from twoends.train.machine import use_threads
from twoends.train.prepare import Prepared, prepare
from twoends.train.ranks import Ranks, join_ranks, leave_ranks
from twoends.train.recipe import Recipe, recipe_text
from twoends.train.report import HELDOUT, SAMPLES, SPEED, append_line, report_html
from twoends.train.snapshot import refuse_earlier_run
from twoends.units import format_bytes, format_duration

# The finished model; the model as of the last snapshot, which samples are written with; what scripts read.
CHECKPOINT, LATEST, RESULT, REPORT = "checkpoint", "latest", "result.json", "report.html"
Card = list[tuple[str, str]]


def train_model(values: Values, screen: Screen, *, out: Path) -> None:
    """`twoends train`. Raises OptionError, and what preparing the text and the export raise."""
    ranks = join_ranks()
    try:
        _train_model(values, screen if ranks.is_first else screen.silent(), out=out, ranks=ranks)
    finally:
        leave_ranks(ranks)


def _train_model(values: Values, screen: Screen, *, out: Path, ranks: Ranks) -> None:
    if not values.resume:
        refuse_earlier_run(out)
    threads = use_threads(values.threads)
    recipe = recipe_of(values, default="nano")
    prepared = _prepare(values, recipe, screen, ranks)
    run = Run(recipe, prepared.text, out, ranks=ranks)
    card = _card(run, threads=threads)
    if values.resume:
        run.restore()
    begins = f"after step {run.done_steps:,} of {recipe.train.steps:,}"
    if recipe.train.compile and run.done_steps < recipe.train.steps:
        begins += "; the first one compiles the model's parts, which takes a minute or so"
    for line in facts([*card, ("begins", begins)]):
        screen.note(line)
    _steps(run, prepared, values, screen)
    _finish(run, prepared, card, values, screen)


def _prepare(values: Values, recipe: Recipe, screen: Screen, ranks: Ranks) -> Prepared:
    """Text and vocabulary; the first rank makes what isn't there, the others read it."""
    if not ranks.is_first:
        ranks.wait()
    folder = corpus_of(values, recipe, screen)
    screen.note("  packing the text")
    prepared = prepare(recipe, corpus_dir=folder, out_dir=Path(values.out))
    if ranks.is_first:
        ranks.wait()
    return prepared


def _card(run: Run, *, threads: int) -> Card:
    """What the run is and what it should cost, measured before its first step."""
    recipe, ranks = run.recipe, run.ranks
    train, memory = recipe.train, run.memory()
    flops = token_flops(recipe.model, row_tokens=train.row_tokens)
    rate = _matmul_rate(run)
    kda = choose_kda(ranks.device)
    per_step = f"{plural(train.batch_rows, 'row')}, {train.micro_rows} at once"
    place = f"{ranks.device.type} ({ranks.reason}), {plural(threads, 'thread')}; torch {torch.__version__}"
    return [
        ("model", f"{sum(p.numel() for p in run.model.parameters()) / 1e6:.2f} million parameters"),
        ("text", f"{plural(len(run.text.rows), 'row')} of {plural(train.row_tokens, 'token')}"),
        ("step", f"{per_step}, on {plural(ranks.world, 'rank')}"),
        ("device", place),
        ("kda", f"{kda.name}: {kda.reason}"),
        ("optimiser", f"{train.optimiser}, balance {train.balance}"),
        ("experts", f"weights {train.expert_weights}, inputs {train.expert_activations}"),
        ("numbers", f"products in {train.matmul_dtype}; weights, router, norms, KDA state, loss binary32"),
        ("work", f"{flops.train / 1e6:.1f} MFLOP a token; matrix products run at {rate / 1e9:.1f} GFLOP/s, "
                 f"so {ranks.world * rate / flops.train:,.0f} tokens/s at most"),
        ("memory", f"{format_bytes(memory.total)} a step: activations {format_bytes(memory.activations)}, "
                   f"weights and gradients {format_bytes(memory.weights + memory.gradients)}, optimiser "
                   f"{format_bytes(memory.optimiser)}"),
    ]  # fmt: skip


def _matmul_rate(run: Run) -> float:
    dtype = torch.bfloat16 if run.recipe.train.matmul_dtype == "bfloat16" else torch.float32
    return matmul_rate(device=run.ranks.device, dtype=dtype)


def _steps(run: Run, prepared: Prepared, values: Values, screen: Screen) -> None:
    until = float("inf") if values.minutes is None else time.monotonic() + values.minutes * 60
    is_first = run.ranks.is_first
    events = EventFile(run.out_dir / "events", first_step=run.done_steps + 1) if is_first else None
    latest: list[Progress] = []

    def progress(now: Progress) -> None:
        latest[:] = [now]
        if events is not None:
            told = dataclasses.asdict(now)
            events.scalars(told.pop("step"), {name: value for name, value in told.items() if name != "steps"})
            speed = {"step": now.step, "tokens_per_s": now.tokens_per_s, "peak_bytes": now.peak_bytes}
            append_line(run.out_dir / SPEED, speed)
        screen.live(
            f"  step {now.step:,} of {now.steps:,} {progress_bar(now.step / now.steps, 8)} loss "
            f"{now.loss_nats:.3f}  {now.tokens_per_s:,.0f} tokens/s  {format_duration(now.left_s)} left"
        )

    def snapshot(heldout: dict[str, float]) -> None:
        if latest:
            screen.note("  " + latest[0].line())
        screen.note("  held out, bits per byte:  " + _bits(heldout))
        _sample(run, prepared, screen)
        if events is not None:
            append_line(run.out_dir / HELDOUT, {"step": run.done_steps, **heldout})
            events.scalars(run.done_steps, {f"heldout/{source}": bits for source, bits in heldout.items()})

    with StopSignals(screen, unit="step") as signals:
        train(
            run,
            should_stop=lambda: signals.asked or time.monotonic() >= until,
            on_progress=progress,
            on_snapshot=snapshot,
        )
    screen.clear_live()
    if events is not None:
        events.close()


def _bits(heldout: dict[str, float]) -> str:
    return "  ".join(f"{source} {bits:.3f}" for source, bits in heldout.items())


def _sample(run: Run, prepared: Prepared, screen: Screen) -> None:
    """Export the model as it is and let the engine write with it."""
    model = run.whole_model()
    if not run.ranks.is_first or not run.recipe.train.prompts:
        return
    directory = run.out_dir / LATEST
    shutil.rmtree(directory, ignore_errors=True)
    export_checkpoint(model, directory, ranks=prepared.ranks)
    samples = engine_samples(directory, run.recipe.train.prompts, screen=screen)
    append_line(run.out_dir / SAMPLES, {"step": run.done_steps, "samples": samples})


def _finish(run: Run, prepared: Prepared, card: Card, values: Values, screen: Screen) -> None:
    """Export a finished run, or say how to go on with an unfinished one."""
    complete = run.done_steps >= run.recipe.train.steps
    model, heldout, stored = run.whole_model(), run.evaluate(), run.evaluate_as_stored()
    if not run.ranks.is_first:
        return
    directory = run.out_dir / CHECKPOINT
    if complete:
        shutil.rmtree(directory, ignore_errors=True)
        export_checkpoint(model, directory, ranks=prepared.ranks)
        shutil.rmtree(run.out_dir / LATEST, ignore_errors=True)
    found = _found(run, complete=complete, heldout=heldout, stored=stored)
    ended = [*card, *_speed(run), ("steps done", f"{run.done_steps:,} of {run.recipe.train.steps:,}")]
    report = report_html(
        run.out_dir,
        title=f"Training run {run.out_dir.name}",
        card=ended,
        records=run.losses,
        recipe_text=recipe_text(run.recipe),
    )
    write_text_atomically(run.out_dir / REPORT, report)
    write_text_atomically(run.out_dir / RESULT, json.dumps(found, indent=1))
    if values.json:
        screen.line(json.dumps(found))
        return
    for line in _ending(run, found, values):
        screen.line(line)


def _found(
    run: Run, *, complete: bool, heldout: dict[str, float], stored: dict[str, float]
) -> dict[str, Any]:
    tail = run.losses[-max(1, len(run.losses) // 10) :]
    finite = [record["max_violation"] for record in tail if math.isfinite(record["max_violation"])]
    return {
        "steps": run.done_steps,
        "tokens": run.done_steps * run.recipe.train.batch_rows * run.recipe.train.row_tokens,
        "complete": complete,
        "loss_nats": run.losses[-1]["loss_nats"] if run.losses else None,
        "heldout_bits_per_byte": heldout,
        "heldout_bits_per_byte_as_stored": stored,
        "max_violation": sum(finite) / len(finite) if finite else None,
        "violation_floor": tail[-1]["violation_floor"] if tail else None,
        "checkpoint": str(run.out_dir / CHECKPOINT) if complete else None,
    }


def _speed(run: Run) -> Card:
    """The speed of this part of the run, as a share of what the products alone would allow."""
    path = run.out_dir / SPEED
    rates = (
        [json.loads(line)["tokens_per_s"] for line in path.read_text().splitlines()] if path.is_file() else []
    )
    if not rates:
        return []
    middle = sorted(rates)[len(rates) // 2]
    flops = token_flops(run.recipe.model, row_tokens=run.recipe.train.row_tokens).train
    share = middle * flops / (run.ranks.world * _matmul_rate(run))
    return [("speed", f"{middle:,.0f} tokens/s (median), {100 * share:.0f} % of the rate of products")]


def _ending(run: Run, found: dict[str, Any], values: Values) -> list[str]:
    place = shlex.quote(str(run.out_dir))
    if found["complete"]:
        directory = run.out_dir / CHECKPOINT
        size = sum(path.stat().st_size for path in directory.iterdir())
        rows = [
            ("trained", f"{plural(found['steps'], 'step')}, {plural(found['tokens'], 'token')}"),
            *_speed(run),
            ("written", f"{directory}, {format_bytes(size)}; {run.out_dir / REPORT}"),
        ]
        after = f'  twoends run {place}/{CHECKPOINT} "Once upon a time"'
    else:
        rows = [
            ("stopped", f"after step {run.done_steps:,} of {run.recipe.train.steps:,}; the snapshot is kept")
        ]
        source = shlex.quote(values.recipe) if values.recipe else f"--preset {values.preset or 'nano'}"
        steps = f" --steps {values.steps}" if values.steps else ""
        after = f"  twoends train {source} --out {place}{steps} --resume"
    return [*facts(rows), "", after]
