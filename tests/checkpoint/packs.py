"""What the tests of packs ask of one."""

from __future__ import annotations

from pathlib import Path

from twoends.checkpoint.config import read_config
from twoends.checkpoint.index import CheckpointIndex
from twoends.checkpoint.pack_file import MANIFEST
from twoends.checkpoint.pack_index import open_pack
from twoends.checkpoint.pack_source import verify_pack

# So small that matrices of a nano model have several blocks.
SMALL_BLOCKS = 20_000


def reopen(directory: Path, **options) -> CheckpointIndex:
    return open_pack(directory, read_config(directory), **options)


def verify(directory: Path) -> int:
    return verify_pack(reopen(directory), progress=lambda done, total: None)


def contents(directory: Path) -> dict[str, bytes]:
    """Every file of a pack but the manifest, which says where the source is."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name != MANIFEST
    }
