"""`twoends inspect`: check a checkpoint's files, and list what is in them."""

from __future__ import annotations

from twoends.cli.command import JSON, Argument, Command, Option, Values, whole_number
from twoends.cli.options import SOURCE
from twoends.cli.screen import Screen


def command() -> Command:
    """The description of `inspect`."""
    return Command(
        name="inspect",
        phrase="check a checkpoint and list what is in it",
        about=(
            "Reads config.json and the header of every shard, checks them against each other and against "
            "the files' sizes, and says what is there. A fault is named with its file and layer (exit 2). "
            "Reads no weight, unless --verify proves a pack against its source."
        ),
        arguments=(Argument(name="MODEL", help="a checkpoint's or a pack's directory", required=True),),
        options=(
            Option(flag="--config", help="list the fields of the architecture"),
            Option(flag="--sizes", help="list every shard"),
            Option(
                flag="--layer",
                value="N",
                convert=whole_number(least=0),
                help="list the tensors of layer N (from 0)",
            ),
            Option(flag="--verify", help="compare a pack with its source, byte for byte"),
            SOURCE,
            JSON,
        ),
        examples=("twoends inspect /data/kimi-k3", "twoends inspect /data/kimi-k3 --layer 3"),
        act=_act,
    )


def _act(values: Values, screen: Screen) -> None:
    from twoends.cli.inspect_model import inspect

    inspect(values, screen)
