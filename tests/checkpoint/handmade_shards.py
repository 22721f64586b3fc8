"""Safetensors files made by hand, right and wrong ones, without the code under test."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

INDEX = "model.safetensors.index.json"
# Of the nano checkpoint of Kimi K3.
PREFIX = "language_model.model."
SHARD_OF_LAYER_3 = "model-00004-of-000010.safetensors"
SHARD_OF_LAYER_5 = "model-00006-of-000010.safetensors"


def header_bytes(entries: dict[str, Any]) -> bytes:
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text


def write_shard(path: Path, entries: dict[str, Any], *, payload: int | None = None) -> Path:
    """A file with this header and zeros for data, as many as the last tensor needs unless said."""
    if payload is None:
        payload = max(entry["data_offsets"][1] for entry in entries.values() if "data_offsets" in entry)
    path.write_bytes(header_bytes(entries) + bytes(payload))
    return path


def split(path: Path) -> tuple[dict[str, Any], bytes]:
    """Header and data of a sound file."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def pack(path: Path, tensors: dict[str, tuple[str, list[int], bytes]]) -> None:
    """A sound file of these (dtype, shape, data)."""
    entries, body = {}, b""
    for name, (dtype, shape, data) in tensors.items():
        span = [len(body), len(body) + len(data)]
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": span}
        body += data
    path.write_bytes(header_bytes(entries) + body)


def unpack(path: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """Every tensor of a sound file."""
    header, body = split(path)
    header.pop("__metadata__", None)
    return {
        name: (entry["dtype"], entry["shape"], body[entry["data_offsets"][0] : entry["data_offsets"][1]])
        for name, entry in header.items()
    }


def edit_index(directory: Path, **changes: str | None) -> dict[str, Any]:
    """Rewrites model.safetensors.index.json with some tensors moved or (None) removed."""
    path = directory / INDEX
    index = json.loads(path.read_text())
    for name, shard in changes.items():
        index["weight_map"].pop(name, None)
        if shard is not None:
            index["weight_map"][name] = shard
    path.write_text(json.dumps(index))
    return index


def edit_shard(directory: Path, shard: str, change: Callable[[dict], None]) -> None:
    """Rewrites one shard with changed tensors, and the index so that it agrees."""
    tensors = unpack(directory / shard)
    change(tensors)
    pack(directory / shard, tensors)
    path = directory / INDEX
    index = json.loads(path.read_text())
    index["weight_map"] = {n: s for n, s in index["weight_map"].items() if s != shard} | dict.fromkeys(
        tensors, shard
    )
    index["metadata"]["total_size"] = sum(len(split(p)[1]) for p in directory.glob("*.safetensors"))
    path.write_text(json.dumps(index))
