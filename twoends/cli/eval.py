"""`twoends eval`: how well a model foretells given texts."""

from __future__ import annotations

from pathlib import Path

from twoends.cli.command import JSON, Argument, Command, Option, Values, whole_number
from twoends.cli.options import CONTEXT, KERNELS, RAM, SOURCE, THREADS
from twoends.cli.screen import Screen
from twoends.errors import OptionError

CHUNK = 16


def command() -> Command:
    """The description of `eval`."""
    return Command(
        name="eval",
        phrase="measure how well a model foretells a text",
        about=(
            "Gives the bits per byte of each text and the share of its tokens that were the model's first "
            "choice, computed by the engine within the budget. A text longer than the context is cut into "
            "windows; the first token of a window has nothing before it and does not count."
        ),
        arguments=(
            Argument(name="MODEL", help="a checkpoint's or a pack's directory; left out, the one that ships"),
        ),
        options=(
            Option(
                flag="--text",
                value="FILE",
                convert=Path,
                many=True,
                help="a text in UTF-8; needed, may be given again",
            ),
            RAM,
            THREADS,
            CONTEXT,
            Option(
                flag="--chunk",
                value="N",
                convert=whole_number(least=1),
                default=CHUNK,
                help=f"tokens in one pass over the weights ({CHUNK})",
            ),
            Option(
                flag="--trace",
                value="FILE",
                convert=Path,
                help="write each read, hit and choice of experts; with --chunk 1 it is one of decoding",
            ),
            SOURCE,
            KERNELS,
            JSON,
        ),
        examples=(
            "twoends eval --text story.txt",
            "twoends eval /data/kimi-k3 --text a.txt --text b.txt --ram 8GB --json",
        ),
        act=_act,
    )


def _act(values: Values, screen: Screen) -> None:
    if not values.text:
        raise OptionError("'eval' needs a text.", remedies=["Name one:  --text FILE"])
    from twoends.cli.eval_model import evaluate

    evaluate(values, screen)
