"""`twoends plan`: how a budget would be used, before anything is read."""

from __future__ import annotations

from twoends.cli.command import JSON, Argument, Command, Values
from twoends.cli.options import CHUNK, CONTEXT, DRAFT, KERNELS, LATENT_EPS, RAM, SEQUENCES, SOURCE, THREADS
from twoends.cli.screen import Screen


def command() -> Command:
    """The description of `plan`."""
    return Command(
        name="plan",
        phrase="show how a budget would be used, before anything is read",
        about=(
            "Shows what would stay in memory, what would stream, what a token would cost, the least budget "
            "that runs (the floor) and the next steps down and up. Reads no weight. A directory with nothing "
            "but config.json will do: sizes are then those of the released layout."
        ),
        arguments=(
            Argument(name="MODEL", help="a checkpoint's or a pack's directory; left out, the one that ships"),
        ),
        options=(RAM, CONTEXT, SEQUENCES, CHUNK, DRAFT, THREADS, KERNELS, LATENT_EPS, SOURCE, JSON),
        examples=("twoends plan /data/kimi-k3 --ram 8GB", "twoends plan /data/kimi-k3 --ram 8GB --json"),
        act=_act,
    )


def _act(values: Values, screen: Screen) -> None:
    from twoends.cli.plan_model import plan

    plan(values, screen)
