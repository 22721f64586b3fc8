"""A profile: how popular each expert was at the end of a run, to begin another run of the same model with.

File (docs/format.md): magic, length of the header, header (JSON), binary32 table [layer][expert],
BLAKE2b of all before. It changes which experts stay in memory, never a bit of the output.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from twoends.engine.curve import HitCurve
from twoends.errors import OptionError, TwoendsError
from twoends.kernels.ops import F32

_MAGIC = b"TWOPROF1"
_DIGEST_BYTES = 32
_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertProfile:
    """Slowly decayed uses of every expert of the model with this fingerprint, and what slots were worth."""

    fingerprint: str
    popularity_LE: F32
    curve: HitCurve | None = None


def write_profile(path: Path, profile: ExpertProfile) -> None:
    """Writes to a temporary name, syncs, renames. Raises TwoendsError where that fails."""
    header = json.dumps(
        {
            "version": 2,
            "fingerprint": profile.fingerprint,
            "shape": list(profile.popularity_LE.shape),
            "curve": None if profile.curve is None else profile.curve.as_object(),
        }
    ).encode()
    body = _MAGIC + len(header).to_bytes(_LENGTH_BYTES, "little") + header
    body += profile.popularity_LE.astype("<f4").tobytes()
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with temporary.open("wb") as file:
            file.write(body + _digest(body))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise TwoendsError(
            f"the profile can't be saved to {path}: {error.strerror}.",
            remedies=["Choose another --save-profile FILE."],
        ) from error
    finally:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            temporary.unlink()


def read_profile(path: Path, *, fingerprint: str, num_layers: int, num_experts: int) -> ExpertProfile:
    """The profile of this very model. Raises OptionError for another model's, or a damaged file."""
    table_bytes = 4 * num_layers * num_experts
    try:
        with path.open("rb") as file:
            # More than any profile of this model holds is not read: it is refused for its length.
            data = file.read(table_bytes + 4096)
    except OSError as error:
        raise OptionError(f"--profile: {path} can't be read: {error.strerror}.") from None
    if data[: len(_MAGIC)] != _MAGIC:
        raise OptionError(
            f"--profile: {path.name} is not a profile of Twoends.",
            evidence=[("expected", repr(_MAGIC)), ("found", repr(data[: len(_MAGIC)]))],
        )
    begin = len(_MAGIC) + _LENGTH_BYTES
    table_at = begin + int.from_bytes(data[len(_MAGIC) : begin], "little")
    header = _header(path, data[begin:table_at])
    if header["fingerprint"] != fingerprint:
        raise OptionError(
            f"--profile: {path.name} was not made by this model.",
            evidence=[("this model", fingerprint), ("profile", str(header["fingerprint"]))],
            remedies=["Make one:  twoends run MODEL PROMPT --save-profile FILE"],
        )
    table_end = table_at + table_bytes
    if header["shape"] != [num_layers, num_experts] or len(data) != table_end + _DIGEST_BYTES:
        raise _damaged(path, "its length is not that of this model's table")
    if data[table_end:] != _digest(data[:table_end]):
        raise _damaged(path, "its checksum differs")
    table_LE = np.frombuffer(data[table_at:table_end], "<f4").reshape(num_layers, num_experts)
    if not np.isfinite(table_LE).all() or (table_LE < 0).any():
        raise _damaged(path, "a count in it is not a number from zero up")
    curve = _curve(path, header.get("curve"))
    return ExpertProfile(fingerprint=fingerprint, popularity_LE=table_LE.astype(np.float32), curve=curve)


def _header(path: Path, raw: bytes) -> dict[str, object]:
    try:
        header = json.loads(raw)
    except ValueError:
        raise _damaged(path, "its header can't be read") from None
    if not isinstance(header, dict) or not {"version", "fingerprint", "shape"} <= header.keys():
        raise _damaged(path, "its header lacks a field")
    if header["version"] not in (1, 2):
        raise OptionError(
            f"--profile: {path.name} has version {header['version']}; this program reads 1 and 2."
        )
    return header


def _curve(path: Path, found: object) -> HitCurve | None:
    """The curve of a header whose checksum was right; version 1 has none."""
    try:
        return None if found is None else HitCurve.from_object(found)
    except (TypeError, ValueError, KeyError):
        raise _damaged(path, "its curve can't be read") from None


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()


def _damaged(path: Path, reason: str) -> OptionError:
    return OptionError(
        f"--profile: {path.name} is damaged: {reason}.",
        remedies=["Leave --profile out, or make it again with --save-profile FILE."],
    )
