"""What a pack directory holds: the manifest, the table of blocks, the names of its files.

    OUT/config.json, tokenizer files   copies of the source's
    OUT/pack.json                      the manifest, written last: without it there is no pack
    OUT/pack-blocks.bin                the table: `BLOCK` of every block, layer by layer, the top last
    OUT/trunk-0000N.pack               the blocks of layer N - 1 (of the top: the last file); with stripes
                                       one file of that name in each stripe's directory

A block begins on a border of 4096 bytes. The embedding stays in the source's shards, and so do the experts
unless they were asked for: then each is one block (pack_expert.py), after the trunk of its layer.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from twoends.checkpoint.writer import write_text
from twoends.errors import CheckpointError
from twoends.kernels.pack_codec import Code

MANIFEST = "pack.json"
TABLE = "pack-blocks.bin"
FORMAT = 2
BORDER = 4096
# Bytes of bf16 rows in a block: about 1 MB of the device when packed.
BLOCK_BYTES = 1_400_000

# place in its file, bytes and CRC-32 of the block, its stripe, 1 if packed (0: the source's bytes)
BLOCK = np.dtype([("offset", "<i8"), ("bytes", "<u4"), ("crc", "<u4"), ("stripe", "<u2"), ("packed", "<u2")])
Blocks = NDArray[np.void]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """pack.json. `stripes` are the directories of the block files, in round-robin order."""

    code: Code
    fingerprint: str
    source: Path
    source_relative: str
    block_bytes: int
    stripes: tuple[str, ...]
    num_blocks: int
    table_crc: int
    trunk_bytes: int
    packed_bytes: int
    # Bytes of the routed experts in the source and here; both 0 where they were not packed.
    experts_bytes: int
    packed_experts_bytes: int

    @property
    def has_experts(self) -> bool:
        """Whether the routed experts are in the pack too."""
        return self.experts_bytes > 0

    def stripe_directories(self, directory: Path) -> tuple[Path, ...]:
        """Where the block files are, seen from the pack's directory."""
        return tuple(directory / stripe for stripe in self.stripes)


def is_pack(directory: Path) -> bool:
    """Whether a directory holds a finished pack."""
    return (directory / MANIFEST).is_file()


def trunk_name(layer: int) -> str:
    """The file of a layer's blocks; the top counts as the layer after the last."""
    return f"trunk-{layer + 1:05d}.pack"


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Writes pack.json whole or not at all. Raises DoesNotFit."""
    fields = {
        "format": FORMAT,
        "code": manifest.code,
        "fingerprint": manifest.fingerprint,
        "source": str(manifest.source),
        "source_relative": manifest.source_relative,
        "block_bytes": manifest.block_bytes,
        "stripes": list(manifest.stripes),
        "num_blocks": manifest.num_blocks,
        "table_crc": manifest.table_crc,
        "trunk_bytes": manifest.trunk_bytes,
        "packed_bytes": manifest.packed_bytes,
        "experts_bytes": manifest.experts_bytes,
        "packed_experts_bytes": manifest.packed_experts_bytes,
    }
    write_text(directory / MANIFEST, json.dumps(fields, indent=2) + "\n")


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a pack. Raises CheckpointError."""
    path = directory / MANIFEST
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _bad_manifest(path, str(error)) from None
    if not isinstance(raw, dict):
        raise _bad_manifest(path, "it is not an object")
    if raw.get("format") != FORMAT or raw.get("code") not in get_args(Code):
        found = f"format {raw.get('format')!r}, code {raw.get('code')!r}"
        codes = " or ".join(f"'{code}'" for code in get_args(Code))
        raise _bad_manifest(path, f"{found}; this version reads format {FORMAT}, code {codes}")
    wanted: dict[str, type] = {
        "code": str,
        "fingerprint": str,
        "source": str,
        "source_relative": str,
        "block_bytes": int,
        "stripes": list,
        "num_blocks": int,
        "table_crc": int,
        "trunk_bytes": int,
        "packed_bytes": int,
        "experts_bytes": int,
        "packed_experts_bytes": int,
    }
    for name, kind in wanted.items():
        if not isinstance(raw.get(name), kind):
            raise _bad_manifest(path, f"the field {name} is missing or is no {kind.__name__}")
    unknown = sorted(set(raw) - set(wanted) - {"format"})
    if unknown:
        raise _bad_manifest(path, f"it has an unknown field, {unknown[0]}")
    fields: dict[str, Any] = {name: raw[name] for name in wanted}
    fields |= {"source": Path(raw["source"]), "stripes": tuple(map(str, raw["stripes"]))}
    return Manifest(**fields)


def find_source(directory: Path, manifest: Manifest, named: Path | None) -> Path:
    """The source's directory: the one named, or where it was, absolutely or seen from the pack."""
    if named is not None:
        return named
    relative = Path(os.path.normpath(directory / manifest.source_relative))
    for place in (manifest.source, relative):
        if (place / "config.json").is_file():
            return place
    raise CheckpointError(
        "the checkpoint that this pack was made from is not where it was; its experts are read from there.",
        evidence=[
            ("pack", str(directory)),
            ("expected", str(manifest.source)),
            ("or", str(relative)),
        ],
        remedies=["Say where it is now:  --source DIR"],
    )


def _bad_manifest(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{path.name} can't be used: {reason}.",
        evidence=[("file", str(path))],
        remedies=["Remove the directory and pack again:  twoends pack MODEL OUT"],
    )
