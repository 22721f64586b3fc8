"""The work of `twoends train --draft-of`, in order: target, recipe, text, steps, export, report.

Imports torch; train.py loads it when everything that can be refused without torch was refused.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import shlex
import time
from pathlib import Path
from typing import Any

import torch

from twoends.checkpoint.draft_config import DraftConfig
from twoends.checkpoint.shipped import shipped_model
from twoends.cli.command import Values
from twoends.cli.screen import Screen, facts, plural, progress_bar
from twoends.cli.stop import StopSignals
from twoends.cli.train_text import corpus_of
from twoends.errors import OptionError
from twoends.generate.lookup import PromptLookup
from twoends.train.bpe import encoding, read_rank_file
from twoends.train.corpus import mixed_documents, read_documents
from twoends.train.draft_eval import DraftRates, evaluate_drafts
from twoends.train.draft_export import card_text, draft_config, export_draft, rates_table, target_identity
from twoends.train.draft_loop import DraftProgress, DraftRun, DraftText, train_draft
from twoends.train.draft_recipe import DraftRecipe, check_draft_recipe, draft_preset, read_draft_recipe
from twoends.train.export import load_checkpoint
from twoends.train.loop import write_text_atomically
from twoends.train.machine import use_threads
from twoends.train.recipe import DRAFT_PRESET, recipe_text
from twoends.train.rows import pack_rows
from twoends.train.snapshot import refuse_earlier_run
from twoends.units import format_bytes, format_duration

# The folder for --draft-model; what scripts read; what people read.
DRAFT, RESULT, REPORT = "draft", "result.json", "report.md"


def train_draft_layer(values: Values, screen: Screen, *, out: Path) -> None:
    """`twoends train --draft-of`. Raises OptionError, and what the text, the target and the export raise."""
    if not values.resume:
        refuse_earlier_run(out)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise OptionError("--draft-of trains in one process; start it without torchrun.")
    target = Path(values.draft_of) if values.draft_of != "nano" or Path("nano").is_dir() else shipped_model()
    threads = use_threads(values.threads)
    recipe = _recipe(values)
    identity = target_identity(target)
    config = draft_config(recipe, target, identity=identity)
    text = _text(values, recipe, target, screen)
    run = DraftRun(recipe, load_checkpoint(target), text, out, identity=identity)
    if values.resume:
        run.restore()
    for line in facts(_card(run, config, threads=threads)):
        screen.note(line)
    if _steps(run, values, screen):
        _finish(run, config, target, values, screen)
    else:
        _say_how_to_go_on(run, values, screen)


def _recipe(values: Values) -> DraftRecipe:
    if values.preset not in (None, DRAFT_PRESET):
        raise OptionError(f"--draft-of goes with --preset {DRAFT_PRESET}, not {values.preset}.")
    if values.recipe is not None and values.preset is not None:
        raise OptionError("a recipe file and --preset were both given; give one of them.")
    recipe = draft_preset() if values.recipe is None else read_draft_recipe(Path(values.recipe))
    if values.steps is not None:
        recipe = dataclasses.replace(recipe, train=dataclasses.replace(recipe.train, steps=values.steps))
    check_draft_recipe(recipe)
    return recipe


def _text(values: Values, recipe: DraftRecipe, target: Path, screen: Screen) -> DraftText:
    """Rows in the target's ids, training and held out."""
    folder = corpus_of(values, recipe, screen)
    screen.note("  packing the text")
    ranks = read_rank_file(target / "tiktoken.model")
    train, data = recipe.train, recipe.data
    # The first special id begins a text, the second ends it (train/recipe.py).
    pack = functools.partial(
        pack_rows, encoder=encoding(ranks), row_tokens=train.row_tokens, eos=len(ranks) + 1
    )
    heldout = {
        source: pack(read_documents(folder, source=source, split="heldout")[: 40 * train.heldout_rows])[
            : train.heldout_rows
        ]
        for source in data.shares
    }
    documents = mixed_documents(folder, shares=data.shares, characters=data.characters, seed=train.seed)
    return DraftText(rows=pack(documents), heldout=heldout)


def _card(run: DraftRun, config: DraftConfig, *, threads: int) -> list[tuple[str, str]]:
    train, layer = run.recipe.train, next(iter(run.layers.values()))
    size = sum(parameter.numel() for parameter in layer.parameters())
    return [
        ("target", f"{config.target}, frozen, in binary32; its embedding and head are used as they are"),
        ("draft", f"{size / 1e6:.3f} million parameters on {', '.join(config.features)}"),
        ("losses", f"{', '.join(run.recipe.draft.losses)}; the first is exported"),
        ("text", f"{plural(len(run.text.rows), 'row')} of {plural(train.row_tokens, 'token')}"),
        ("step", f"{plural(train.batch_rows, 'row')}, {run.recipe.draft.unrolled_steps} ids unrolled"),
        ("device", f"cpu, {plural(threads, 'thread')}; torch {torch.__version__}"),
        ("begins", f"after step {run.done_steps:,} of {train.steps:,}"),
    ]


def _steps(run: DraftRun, values: Values, screen: Screen) -> bool:
    until = float("inf") if values.minutes is None else time.monotonic() + values.minutes * 60
    latest: list[DraftProgress] = []

    def progress(now: DraftProgress) -> None:
        latest[:] = [now]
        screen.live(
            f"  step {now.step:,} of {now.steps:,} {progress_bar(now.step / now.steps, 8)} loss "
            f"{now.loss_nats:.3f}  {now.tokens_per_s:,.0f} tokens/s  {format_duration(now.left_s)} left"
        )

    def snapshot() -> None:
        now = latest[0]
        screen.note(f"  step {now.step:,} of {now.steps:,}  loss {now.loss_nats:.4f} nats; snapshot kept")

    with StopSignals(screen, unit="step") as signals:
        complete = train_draft(
            run,
            should_stop=lambda: signals.asked or time.monotonic() >= until,
            on_progress=progress,
            on_snapshot=snapshot,
        )
    screen.clear_live()
    return complete


def lookup_guesses(ids: list[int], count: int) -> list[list[int]]:
    """What prompt lookup would guess after each id of a document that it has seen so far."""
    lookup = PromptLookup(len(ids))
    found = []
    for end in range(1, len(ids) + 1):
        lookup.extend(ids[:end])
        found.append(lookup.draft(count))
    return found


def _finish(run: DraftRun, config: DraftConfig, target: Path, values: Values, screen: Screen) -> None:
    screen.note("  measuring on held-out text")
    rates = evaluate_drafts(run, guesses={"prompt lookup": lookup_guesses})
    exported = run.recipe.draft.losses[0]
    card = card_text(config, run.recipe, rates, steps=run.done_steps)
    folder = run.out_dir / DRAFT
    export_draft(run.layers[exported], folder, config=config, target=target, card=card)
    found = _found(run, rates, folder)
    write_text_atomically(run.out_dir / REPORT, _report(run, rates))
    write_text_atomically(run.out_dir / RESULT, json.dumps(found, indent=1))
    if values.json:
        screen.line(json.dumps(found))
        return
    size = sum(path.stat().st_size for path in folder.iterdir())
    for line in facts([
        ("trained", f"{plural(found['steps'], 'step')}, {plural(found['tokens'], 'token')}"),
        *((name, _rates_line(of_name)) for name, of_name in rates.items()),
        ("written", f"{folder}, {format_bytes(size)}; {run.out_dir / REPORT}"),
    ]):  # fmt: skip
        screen.line(line)
    screen.line()
    model = shlex.quote(str(target))
    screen.line(f'  twoends run {model} "Once upon a time" --draft-model {shlex.quote(str(folder))}')


def _rates_line(rates: DraftRates) -> str:
    greedy = ", ".join(f"{rate:.2f}" for rate in rates.greedy)
    overlap = ", ".join(f"{rate:.2f}" for rate in rates.overlap)
    return f"greedy {greedy} ({rates.kept:.2f} ids a pass); sampling {overlap}"


def _found(run: DraftRun, rates: dict[str, DraftRates], folder: Path) -> dict[str, Any]:
    train = run.recipe.train
    return {
        "steps": run.done_steps,
        "tokens": run.done_steps * train.batch_rows * train.row_tokens,
        "complete": True,
        "exported": run.recipe.draft.losses[0],
        "rates": {name: dataclasses.asdict(of_name) for name, of_name in rates.items()},
        "last": run.losses[-1] if run.losses else None,
        "draft": str(folder),
    }


def _report(run: DraftRun, rates: dict[str, DraftRates]) -> str:
    """What was trained, what came of it, and the recipe."""
    every = max(1, len(run.losses) // 20)
    names = run.recipe.draft.losses
    curve = [f"| step | {' | '.join(names)} |", "|---:|" + "---:|" * len(names)]
    for record in run.losses[every - 1 :: every]:
        cells = " | ".join(f"{record[f'{name}_nats']:.3f}" for name in names)
        curve.append(f"| {record['step']} | {cells} |")
    return "\n".join([
        f"# Draft run {run.out_dir.name}", "", rates_table(rates), "", "Loss in nats, each its own:", "",
        *curve, "", "```", recipe_text(run.recipe).rstrip(), "```", "",
    ])  # fmt: skip


def _say_how_to_go_on(run: DraftRun, values: Values, screen: Screen) -> None:
    recipe = shlex.quote(values.recipe) + " " if values.recipe else ""
    steps = f" --steps {values.steps}" if values.steps else ""
    screen.line(
        f"  stopped after step {run.done_steps:,} of {run.recipe.train.steps:,}; the snapshot is kept"
    )
    screen.line()
    place = shlex.quote(str(run.out_dir))
    screen.line(
        f"  twoends train {recipe}--draft-of {shlex.quote(values.draft_of)} --out {place}{steps} --resume"
    )
