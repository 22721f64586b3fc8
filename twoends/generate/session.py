"""Sessions: token ids and state in one file that continues exactly, or is refused.

File (docs/format.md): 8 bytes "TWOENDS1", 8 bytes header length (little-endian), the header (JSON),
32 bytes BLAKE2b of all that, the arrays as little-endian binary32 in the order of the header, 32
bytes BLAKE2b of all before. So a plan can trust the header before the arrays are read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from twoends.engine.open import Checkpoint
from twoends.errors import DoesNotFit, SessionError
from twoends.kernels.ops import F32
from twoends.model.state import SequenceState
from twoends.units import format_bytes

_MAGIC = b"TWOENDS1"
_DIGEST_BYTES = 32
_MAX_HEADER_BYTES = 1 << 28


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedSession:
    """What a session file says before its arrays are read."""

    path: Path
    ids: list[int]
    position: int
    arrays: list[tuple[str, tuple[int, ...]]]
    arrays_at: int


def save_session(path: Path, *, checkpoint: Checkpoint, ids: list[int], state: SequenceState) -> int:
    """Writes a session beside its final name, then renames it; gives the file's size in bytes.

    Raises DoesNotFit when the disk is full (nothing half written stays) and SessionError when the
    place can't be written.
    """
    arrays = list(state.arrays())
    header = json.dumps(
        {
            **_identity(checkpoint),
            "ids": ids,
            "position": state.position,
            "arrays": [[name, list(array.shape)] for name, array in arrays],
        }
    ).encode("ascii")
    size = len(_MAGIC) + 8 + len(header) + sum(array.nbytes for _, array in arrays) + 2 * _DIGEST_BYTES
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        free = shutil.disk_usage(path.absolute().parent).free
        if free < size:
            raise _disk_full(path, size, free)
        with temporary.open("wb") as file:
            _write(file, header, arrays)
        temporary.replace(path)
    except OSError as error:
        if error.errno in (28, 122):  # ENOSPC, EDQUOT
            raise _disk_full(path, size, None) from error
        raise SessionError(
            f"the session can't be saved to {path}: {error.strerror}.",
            remedies=["Choose another --save FILE."],
        ) from error
    finally:
        # Whatever ended it, a signal included; after the rename there is no such file.
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            temporary.unlink()
    return size


def read_session(path: Path, *, checkpoint: Checkpoint) -> SavedSession:
    """The header of a session file of this very checkpoint. Raises SessionError."""
    try:
        with path.open("rb") as file:
            header, arrays_at = _read_header(path, file)
    except OSError as error:
        raise SessionError(f"{path} can't be read: {error.strerror}.") from error
    for key, expected in _identity(checkpoint).items():
        if header.get(key) != expected:
            raise SessionError(
                f"{path.name} was not made by this model.",
                evidence=[("field", key), ("this model", str(expected)), ("session", str(header.get(key)))],
                remedies=["Continue it with the checkpoint and options that it was saved with."],
            )
    return SavedSession(
        path=path,
        ids=[int(i) for i in header["ids"]],
        position=int(header["position"]),
        arrays=[(str(name), tuple(shape)) for name, shape in header["arrays"]],
        arrays_at=arrays_at,
    )


def restore_state(saved: SavedSession, state: SequenceState) -> None:
    """Reads the arrays into `state`, whose capacity must hold them; checks every byte's digest."""
    assert saved.position <= state.capacity
    state.position = saved.position
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    expected = [(name, array.shape) for name, array in state.arrays()]
    if expected != saved.arrays:
        raise _damaged(saved.path, "its arrays are not those of this model")
    with saved.path.open("rb") as file:
        digest.update(file.read(saved.arrays_at))
        for _, array in state.arrays():
            view = array.reshape(-1).view(np.uint8).data
            if file.readinto(view) != array.nbytes:
                raise _damaged(saved.path, "it ends early")
            digest.update(view)
        found = file.read(_DIGEST_BYTES + 1)
    if found != digest.digest():
        raise _damaged(saved.path, "its checksum differs")


def _identity(checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "version": 1,
        # Before the fingerprint, which it is a part of: so that a refusal names what differs.
        "latent_eps": checkpoint.config.latent_eps,
        "expert_activations": checkpoint.config.expert_activations,
        "fingerprint": checkpoint.index.fingerprint,
    }


def _write(file: BinaryIO, header: bytes, arrays: list[tuple[str, F32]]) -> None:
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    head = _MAGIC + len(header).to_bytes(8, "little") + header
    head += _digest_of(head)
    file.write(head)
    digest.update(head)
    for _, array in arrays:
        # A view: a copy of a long cache would not be in the budget.
        view = array.reshape(-1).view(np.uint8).data
        file.write(view)
        digest.update(view)
    file.write(digest.digest())
    file.flush()
    os.fsync(file.fileno())


def _read_header(path: Path, file: BinaryIO) -> tuple[dict[str, Any], int]:
    start = file.read(len(_MAGIC) + 8)
    if len(start) < len(_MAGIC) + 8 or start[: len(_MAGIC)] != _MAGIC:
        raise SessionError(
            f"{path.name} is not a session of Twoends.",
            evidence=[("expected", repr(_MAGIC)), ("found", repr(start[: len(_MAGIC)]))],
        )
    length = int.from_bytes(start[len(_MAGIC) :], "little")
    if length > min(_MAX_HEADER_BYTES, path.stat().st_size):
        raise _damaged(path, f"it announces a header of {length:,} bytes")
    raw = file.read(length)
    if file.read(_DIGEST_BYTES) != _digest_of(start + raw):
        raise _damaged(path, "the checksum of its header differs")
    header = json.loads(raw)
    if not isinstance(header, dict) or not {"ids", "position", "arrays"} <= header.keys():
        raise _damaged(path, "its header lacks a field")
    return header, len(start) + length + _DIGEST_BYTES


def _digest_of(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()


def _damaged(path: Path, reason: str) -> SessionError:
    return SessionError(
        f"{path.name} is damaged: {reason}.",
        evidence=[("file", str(path))],
        remedies=["Nothing of it was used. Start again without --load, or use another session file."],
    )


def _disk_full(path: Path, size: int, free: int | None) -> DoesNotFit:
    room = "" if free is None else f"; {format_bytes(free)} are free"
    return DoesNotFit(
        f"the session needs {format_bytes(size)} at {path.absolute().parent}{room}.",
        remedies=["Nothing half written was left. Free space, or choose another --save FILE."],
    )
