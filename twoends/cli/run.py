"""`twoends run`: text from a model, within a memory budget."""

from __future__ import annotations

from pathlib import Path

from twoends.cli.command import (
    JSON,
    Argument,
    Command,
    Option,
    Values,
    real_number,
    whole_number,
)
from twoends.cli.options import (
    CHUNK,
    CONTEXT,
    DRAFT,
    DRAFT_FROM,
    DRAFT_MODEL,
    EXPERT_ACTIVATIONS,
    KERNELS,
    LATENT_EPS,
    LOOK_AHEAD,
    PROFILE,
    RAM,
    SOURCE,
    THREADS,
    ids_of,
)
from twoends.cli.screen import Screen


def command() -> Command:
    """The description of `run`."""
    return Command(
        name="run",
        phrase="write text with a model, within a memory budget",
        about=(
            "Continues a prompt. Weights come from disk as they are needed; the text and every bit of the "
            "logits are the same at every budget. stdout has only the text, stderr tells what happens. "
            "Ctrl-C finishes the pass over the weights, saves the session and says how to go on."
        ),
        arguments=(
            Argument(name="MODEL", help="a checkpoint's or a pack's directory; left out, the one that ships"),
            Argument(name="PROMPT", help="the text to continue; - reads it from stdin"),
        ),
        options=_options(),
        examples=(
            'twoends run "Once upon a time"',
            'twoends run /data/kimi-k3 "The capital of France is" --ram 8GB -n 8',
        ),
        act=_act,
    )


def _options() -> tuple[Option, ...]:
    whole = whole_number(least=0)
    return (
        Option(flag="--ids", value="1,2,3", convert=ids_of, help="token ids instead of a text"),
        Option(flag="-n", value="N", convert=whole_number(least=1), default=64, help="at most N tokens (64)"),
        RAM,
        THREADS,
        CHUNK,
        DRAFT,
        DRAFT_FROM,
        DRAFT_MODEL,
        CONTEXT,
        LOOK_AHEAD,
        Option(
            flag="--policy",
            choices=("decayed", "lru"),
            default="decayed",
            help="which expert gives way: decayed frequency (default) or least recently used",
        ),
        Option(
            flag="--temperature",
            value="T",
            convert=real_number,
            default=0.0,
            help="0 takes the likeliest token (default); above 0 draws",
        ),
        Option(
            flag="--top-p",
            value="P",
            convert=real_number,
            default=1.0,
            help="draw from the likeliest tokens that together have this share (1)",
        ),
        Option(
            flag="--top-k", value="K", convert=whole, default=0, help="draw from the K likeliest (0: all)"
        ),
        Option(flag="--seed", value="S", convert=whole, default=0, help="which draw (0)"),
        Option(flag="--stop", value="TEXT", many=True, help="end before this text; may be given again"),
        Option(flag="--save", value="FILE", convert=Path, help="keep the session, to go on later"),
        Option(flag="--load", value="FILE", convert=Path, help="go on from a session"),
        Option(flag="--trace", value="FILE", convert=Path, help="write each read, hit and wait to FILE"),
        Option(flag="--save-profile", value="FILE", convert=Path, help="keep which experts were popular"),
        PROFILE,
        EXPERT_ACTIVATIONS,
        LATENT_EPS,
        SOURCE,
        KERNELS,
        Option(flag="--no-direct", help="read through the page cache (without O_DIRECT)"),
        JSON,
    )


def _act(values: Values, screen: Screen) -> None:
    # The engine and numpy are loaded here, so that help is fast.
    from twoends.cli.run_model import run

    run(values, screen)
