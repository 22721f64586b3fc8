"""`twoends tiny`: a small synthetic checkpoint with the real tensor graph."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path

from twoends.cli.command import JSON, Argument, Command, Option, Values, whole_number
from twoends.cli.screen import Screen, facts, plural, progress_bar
from twoends.errors import OptionError
from twoends.units import format_bytes


def command() -> Command:
    """The description of `tiny`."""
    return Command(
        name="tiny",
        phrase="write a small synthetic checkpoint to try things on",
        about=(
            "Writes a checkpoint in the released layout and names, with a tokenizer. Its weights are random "
            "but behave like trained ones; its text means nothing. The same options give the same bytes."
        ),
        arguments=(Argument(name="DIR", help="where to write; new, or empty", required=True),),
        options=(
            Option(
                flag="--preset",
                choices=("nano", "mini", "midi", "layer"),
                default="nano",
                help="nano: 4 MB (default); mini: 1.7 GB; midi: 7.7 GB; layer: Kimi K3's true dimensions",
            ),
            Option(
                flag="--family",
                choices=("kimi-k3", "kimi-linear"),
                default="kimi-k3",
                help="which architecture (kimi-k3)",
            ),
            Option(
                flag="--seed", value="S", convert=whole_number(least=0), default=0, help="which weights (0)"
            ),
            Option(
                flag="--layers",
                value="N",
                convert=whole_number(least=2),
                help="another depth than the preset's",
            ),
            Option(flag="--sparse", help="leave the experts as holes: they read as zeros and take no room"),
            JSON,
        ),
        examples=("twoends tiny /tmp/nano", "twoends tiny /data/layer --preset layer --layers 5 --sparse"),
        act=_act,
    )


def _act(values: Values, screen: Screen) -> None:
    from twoends.checkpoint.tiny import write_tiny
    from twoends.engine.open import Checkpoint

    directory = Path(values.dir)
    _refuse_full(directory)
    write_tiny(
        directory,
        preset=values.preset,
        family=values.family,
        seed=values.seed,
        num_layers=values.layers,
        sparse=values.sparse,
        progress=lambda done, total: _draw(screen, done, total),
    )
    screen.clear_live()
    index = Checkpoint.open(directory).index
    disk_bytes = sum(os.stat(path).st_blocks * 512 for path in index.paths)
    if values.json:
        found = {
            "directory": str(directory),
            "family": values.family,
            "preset": values.preset,
            "seed": values.seed,
            "fingerprint": index.fingerprint,
            "num_layers": index.config.num_layers,
            "num_tensors": index.num_tensors,
            "total_bytes": index.total_bytes,
            "disk_bytes": disk_bytes,
        }
        screen.line(json.dumps(found))
        return
    room = f", {format_bytes(disk_bytes)} on disk" if values.sparse else ""
    rows = [
        (
            "written",
            f"{plural(len(index.paths), 'shard')}, {index.num_tensors:,} tensors, "
            f"{format_bytes(index.total_bytes)}{room}",
        ),
        ("to", str(directory)),
        ("fingerprint", index.fingerprint),
    ]
    for line in (*facts(rows), "", f'  twoends run {shlex.quote(str(directory))} "Hello" -n 16'):
        screen.line(line)


def _refuse_full(directory: Path) -> None:
    if directory.exists() and not directory.is_dir():
        raise OptionError(f"{directory} is a file; DIR must be a new or empty directory.")
    there = sorted(path.name for path in directory.iterdir()) if directory.is_dir() else []
    if there:
        raise OptionError(
            f"{directory} is not empty.",
            evidence=[("found", ", ".join(there[:3]) + (", ..." if len(there) > 3 else ""))],
            remedies=["Nothing was written. Choose a new directory, or an empty one."],
        )


def _draw(screen: Screen, done: int, total: int) -> None:
    share = done / total if total else 1.0
    screen.live(f"  writing {progress_bar(share, 30)} {format_bytes(done)} of {format_bytes(total)}")
