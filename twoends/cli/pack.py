"""`twoends pack`: the trunk of a checkpoint again, lossless, in about two thirds of its bytes."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from twoends.cli.command import JSON, Argument, Command, Option, Values
from twoends.cli.screen import Screen, facts, plural, progress_bar, share_text
from twoends.errors import OptionError
from twoends.units import format_bytes

if TYPE_CHECKING:
    from twoends.checkpoint.pack_write import Packed


def command() -> Command:
    """The description of `pack`."""
    return Command(
        name="pack",
        phrase="store the trunk in two thirds of its bytes, lossless",
        about=(
            "Writes the trunk of MODEL into OUT in a form that is read and multiplied as it is: every bit "
            "of every logit stays the same, and fewer bytes move. The embedding is still read from MODEL, "
            "and so are the experts without --experts. OUT is then given where a checkpoint is. Stopped at "
            "any point, the same command goes on; on a finished pack it writes what is damaged again."
        ),
        arguments=(
            Argument(name="MODEL", help="a checkpoint's directory", required=True),
            Argument(name="OUT", help="where to write; new, or empty, or this pack begun", required=True),
        ),
        options=_options(),
        examples=(
            "twoends pack /data/kimi-k3 /fast/kimi-k3",
            "twoends pack /data/kimi-k3 /fast/kimi-k3 --stripe /nvme0/k3,/nvme1/k3",
            "twoends inspect /fast/kimi-k3 --verify",
        ),
        act=_act,
    )


def _options() -> tuple[Option, ...]:
    return (
        Option(
            flag="--code",
            choices=("entropy", "fixed"),
            default="entropy",
            help="entropy: about 0.67 of the bytes; fixed: about 0.70, a little less arithmetic",
        ),
        Option(
            flag="--experts",
            help="pack the routed experts too; copies all of them, so look at the room first",
        ),
        Option(
            flag="--stripe",
            value="DIR,DIR",
            convert=_directories,
            default=(),
            help="spread the blocks over directories on several disks, about 1 MB to each in turn",
        ),
        JSON,
    )


def _act(values: Values, screen: Screen) -> None:
    from twoends.checkpoint.pack_write import write_pack
    from twoends.engine.open import Checkpoint

    index = Checkpoint.open(Path(values.model)).index
    if index.pack is not None:
        raise OptionError(
            f"{values.model} is a pack already.", remedies=[f"Pack its source:  {index.directory}"]
        )
    out = Path(values.out)
    if values.experts and not values.json:
        screen.line(f"  copying  {format_bytes(index.experts_bytes)} of experts beside the trunk")
    found = write_pack(
        index,
        out,
        code=values.code,
        experts=values.experts,
        stripes=values.stripe,
        progress=lambda done, total: _draw(screen, done, total),
    )
    screen.clear_live()
    if values.json:
        fields = {
            "directory": str(out),
            "source": str(index.directory),
            "code": values.code,
            "fingerprint": index.fingerprint,
            "num_blocks": found.num_blocks,
            "raw_blocks": found.raw_blocks,
            "kept_layers": found.kept_layers,
            "trunk_bytes": found.trunk_bytes,
            "packed_bytes": found.packed_bytes,
            "experts_bytes": found.experts_bytes,
            "packed_experts_bytes": found.packed_experts_bytes,
        }
        screen.line(json.dumps(fields))
        return
    name = shlex.quote(str(out))
    for line in (
        *facts(_rows(found, out)),
        "",
        f"  twoends inspect {name} --verify",
        f'  twoends run {name} "Hello" -n 16',
    ):
        screen.line(line)


def _rows(found: Packed, out: Path) -> list[tuple[str, str]]:
    raw = f", {found.raw_blocks:,} of them as they were" if found.raw_blocks else ""
    rows = [
        (
            "packed",
            f"{format_bytes(found.trunk_bytes)} to {format_bytes(found.packed_bytes)} "
            f"({share_text(found.packed_bytes, found.trunk_bytes)})",
        ),
        ("blocks", f"{found.num_blocks:,}{raw}"),
        ("to", str(out)),
    ]
    if found.experts_bytes:
        sizes = f"{format_bytes(found.experts_bytes)} to {format_bytes(found.packed_experts_bytes)}"
        share = f"{found.packed_experts_bytes / found.experts_bytes:.1%}"
        rows.insert(1, ("experts", f"{sizes} ({share})"))
    if found.kept_layers:
        kept = f"{found.kept_layers} of {plural(found.num_layers, 'file')}, read back and found right"
        rows.insert(0, ("kept", kept))
    return rows


def _directories(word: str) -> tuple[Path, ...]:
    names = [name.strip() for name in word.split(",")]
    if len(names) < 2 or not all(names) or len({Path(name).resolve() for name in names}) < len(names):
        raise OptionError(f"'{word}' is no list of different directories.", remedies=["Write  DIR,DIR"])
    return tuple(Path(name) for name in names)


def _draw(screen: Screen, done: int, total: int) -> None:
    bar = progress_bar(done / total, 30)
    screen.live(f"  packing {bar} {format_bytes(done)} of {format_bytes(total)}")
