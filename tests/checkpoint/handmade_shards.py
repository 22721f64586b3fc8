"""Safetensors files made by hand, right and wrong ones, without the code under test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


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
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    for name, shard in changes.items():
        index["weight_map"].pop(name, None)
        if shard is not None:
            index["weight_map"][name] = shard
    path.write_text(json.dumps(index))
    return index
