"""The index of a large checkpoint, kept in the user's cache directory: half a second instead of five.

A file is: BLAKE2b-256 of the rest, one line of JSON, the arrays' bytes. It is used only if its key
(directory, shard sizes and times, config, format version) is the present one and its checksum holds;
anything else means that it is built again. A cache that can't be written is not an error.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from twoends.checkpoint.config import ModelConfig
from twoends.checkpoint.index_file import INDEX_NAME
from twoends.checkpoint.index_tables import Tables

FORMAT_VERSION = 1

_DIGEST_BYTES = 32
_ARRAYS = ("row_path", "row_offset", "row_dtype", "row_shape", "expert_path_LEP", "expert_offset_LEP")
_NUMBERS = ("num_tensors", "payload_bytes", "vision_tensors", "vision_bytes")


def cache_directory() -> Path:
    """Where indexes are kept: XDG_CACHE_HOME, or the platform's place for caches."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    # Stays "~" for a user without a home directory.
    home = Path(os.path.expanduser("~"))
    if os.path.isabs(named):
        base = Path(named)
    elif not home.is_absolute():
        base = Path(tempfile.gettempdir())
    elif sys.platform == "darwin":
        base = home / "Library" / "Caches"
    else:
        base = home / ".cache"
    return base / "twoends" / "index"


def cache_key(directory: Path, shards: tuple[Path, ...], config: ModelConfig) -> dict[str, Any]:
    """What an index depends on; also the shards' sizes, which the caller needs."""
    stats = [path.stat() for path in shards]
    index = directory / INDEX_NAME
    index_stat = index.stat() if index.exists() else None
    return {
        "version": FORMAT_VERSION,
        "directory": str(directory.resolve()),
        "config": config.digest,
        "shards": [
            [path.name, stat.st_size, stat.st_mtime_ns] for path, stat in zip(shards, stats, strict=True)
        ],
        "index": None if index_stat is None else [index_stat.st_size, index_stat.st_mtime_ns],
    }


def load(key: dict[str, Any]) -> tuple[Tables, list[str]] | None:
    """The tables and header digests kept under `key`; None if there are none, or they are damaged."""
    try:
        data = _place(key).read_bytes()
    except OSError:
        return None
    digest, body = data[:_DIGEST_BYTES], memoryview(data)[_DIGEST_BYTES:]
    if hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest() != digest:
        return None
    end = data.find(b"\n", _DIGEST_BYTES)
    head = json.loads(data[_DIGEST_BYTES:end])
    if head["key"] != key:
        return None
    arrays: dict[str, Any] = {}
    at = end + 1
    for name, dtype, shape in head["arrays"]:
        count = int(np.prod(shape, dtype=np.int64))
        arrays[name] = np.frombuffer(data, dtype=dtype, count=count, offset=at).reshape(shape)
        at += arrays[name].nbytes
    tables = Tables(
        expert_format=head["expert_format"],
        shapes=tuple(tuple(shape) for shape in head["shapes"]),
        **arrays,
        **{name: head[name] for name in _NUMBERS},
    )
    return tables, head["header_digests"]


def save(key: dict[str, Any], tables: Tables, header_digests: list[str]) -> bool:
    """Keeps an index; False if the cache can't be written."""
    arrays = [(name, getattr(tables, name)) for name in _ARRAYS]
    head = {
        "key": key,
        "header_digests": header_digests,
        "expert_format": tables.expert_format,
        "shapes": tables.shapes,
        "arrays": [(name, array.dtype.str, array.shape) for name, array in arrays],
        **{name: getattr(tables, name) for name in _NUMBERS},
    }
    line = json.dumps(head).encode("ascii") + b"\n"
    body = b"".join([line, *(array.tobytes() for _, array in arrays)])
    digest = hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest()
    place = _place(key)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=place.parent, delete=False) as file:
            try:
                file.write(digest)
                file.write(body)
                file.close()
                os.replace(file.name, place)
            except OSError:
                os.unlink(file.name)
                raise
    except OSError:
        return False
    return True


def _place(key: dict[str, Any]) -> Path:
    """One file per directory and config, so that a changed checkpoint replaces its old index."""
    text = f"{key['directory']}\n{key['config']}"
    return cache_directory() / f"{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}.index"
