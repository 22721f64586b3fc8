"""One safetensors file: its header, read and checked against the file's length.

The file is eight bytes of header length N (little endian), N bytes of JSON, then the tensors' bytes
without gaps. Each JSON entry is name -> {dtype, shape, data_offsets [begin, end)}, offsets counted
from the end of the header; "__metadata__" may hold words. Everything that the format promises is
checked here, so that a shard that is short, long or muddled is refused before a weight is read.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twoends.checkpoint.names import layer_of, num_values
from twoends.errors import CheckpointError

I64 = NDArray[np.int64]
# begin, end, name, dtype, shape: sorts by place
_Entry = tuple[int, int, str, str, tuple[int, ...]]

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
# Bytes of one value; formats of less than a byte are not written by any release of this family.
_SIZES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "C64": 8,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip
_MAX_OFFSET = 1 << 62
_ENTRY_FIELDS = {"dtype", "shape", "data_offsets"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardHeader:
    """A checked header, tensors in the order of their bytes. Offsets are absolute in the file."""

    path: Path
    file_bytes: int
    data_start: int
    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    begins: I64
    ends: I64
    # BLAKE2b-128 of the header's bytes
    digest: bytes

    @property
    def payload_bytes(self) -> int:
        """Bytes of all tensors."""
        return self.file_bytes - self.data_start


def read_header(path: Path) -> ShardHeader:
    """The header of one file. Raises CheckpointError naming the file, what was expected and found."""
    try:
        with path.open("rb") as file:
            file_bytes = os.fstat(file.fileno()).st_size
            length = _header_length(path, file.read(LENGTH_BYTES), file_bytes)
            raw = file.read(length)
    except OSError as error:
        raise CheckpointError(
            f"{path.name} can't be read: {error.strerror}.", evidence=[("file", str(path))]
        ) from None
    entries = _entries(path, raw)
    data_start = LENGTH_BYTES + length
    begin_list, end_list, names, dtypes, shapes = zip(*sorted(entries), strict=True)
    begins = np.array(begin_list, dtype=np.int64)
    ends = np.array(end_list, dtype=np.int64)
    _check_no_gaps(path, names, begins, ends)
    _check_length(path, names, ends, data_start=data_start, file_bytes=file_bytes)
    return ShardHeader(
        path=path,
        file_bytes=file_bytes,
        data_start=data_start,
        names=names,
        dtypes=dtypes,
        shapes=shapes,
        begins=begins + data_start,
        ends=ends + data_start,
        digest=hashlib.blake2b(raw, digest_size=16).digest(),
    )


def fetch_again(path: Path) -> list[str]:
    """What to do about one damaged file."""
    return [f"Fetch {path.name} again, then:  twoends inspect MODEL --sizes"]


def _header_length(path: Path, first: bytes, file_bytes: int) -> int:
    """The eight-byte length at the start, if such a header can be in this file."""
    if len(first) < LENGTH_BYTES:
        raise _damaged(
            path,
            f"{path.name} has {file_bytes} bytes, too few to state the length of a header.",
            [
                ("file", str(path)),
                ("expected", f"at least {LENGTH_BYTES} bytes"),
                ("found", f"{file_bytes} bytes"),
            ],
        )
    length = int.from_bytes(first, "little")
    limit = min(MAX_HEADER_BYTES, file_bytes - LENGTH_BYTES)
    if 2 <= length <= limit:
        return length
    raise _damaged(
        path,
        f"{path.name} states a header of {length:,} bytes; from 2 to {limit:,} are possible.",
        [
            ("file", str(path)),
            ("expected", f"at most {MAX_HEADER_BYTES:,} bytes, within the file's {file_bytes:,}"),
            ("found", f"{length:,} (first bytes {first.hex(' ')})"),
        ],
    )


def _entries(path: Path, raw: bytes) -> list[_Entry]:
    """Every tensor of a header, each entry sound by itself."""
    if not raw.startswith(b"{"):
        raise _bad_json(path, f"it begins with {raw[:8]!r}, not with an opening brace")
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise _bad_json(path, str(error)) from None
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(word, str) for word in metadata.values()):
        raise _bad_json(path, "__metadata__ must hold words only")
    if not header:
        raise _bad_json(path, "it names no tensor")
    return [_entry(path, name, entry) for name, entry in header.items()]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"'{twice}' appears twice")
    return found


def _entry(path: Path, name: str, entry: Any) -> _Entry:
    if not isinstance(entry, dict) or entry.keys() != _ENTRY_FIELDS:
        found = ", ".join(sorted(entry)) if isinstance(entry, dict) else type(entry).__name__
        raise _bad_tensor(path, name, expected="dtype, shape, data_offsets", found=found)
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _SIZES:
        raise _bad_tensor(path, name, expected=f"a dtype among {', '.join(_SIZES)}", found=f"{dtype!r}")
    if not _are_counts(shape):
        raise _bad_tensor(path, name, expected="a shape of whole numbers", found=f"{shape!r:.60}")
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _bad_tensor(path, name, expected="two rising data offsets", found=f"{offsets!r:.60}")
    begin, end = offsets
    dims = tuple(shape)
    wanted = num_values(dims) * _SIZES[dtype]
    if end - begin != wanted:
        raise _bad_tensor(
            path, name, expected=f"{wanted:,} bytes ({dtype} {list(dims)})", found=f"{end - begin:,} bytes"
        )
    return begin, end, name, dtype, dims


def _are_counts(value: Any) -> bool:
    """A list of whole numbers that fit a file offset; true and false are not numbers."""
    if type(value) is not list:
        return False
    for n in value:  # a plain loop: half a million tensors pass here  # noqa: SIM110
        if type(n) is not int or not 0 <= n < _MAX_OFFSET:
            return False
    return True


def _check_no_gaps(path: Path, names: Sequence[str], begins: I64, ends: I64) -> None:
    """Tensors must follow one another from offset 0, in the order of their begins."""
    wanted = np.concatenate([[0], ends[:-1]])
    wrong = np.flatnonzero(begins != wanted)
    if wrong.size == 0:
        return
    i = int(wrong[0])
    distance = int(begins[i] - wanted[i])
    before = names[i - 1] if i else "(start of the data)"
    what = f"{distance:,} bytes after the end of" if distance > 0 else f"{-distance:,} bytes inside"
    raise _damaged(
        path,
        f"Two tensors of {path.name} {'leave a hole' if distance > 0 else 'overlap'}.",
        [
            ("file", str(path)),
            *_tensor_rows(names[i]),
            ("expected", f"to begin at data offset {wanted[i]:,}, where {before} ends"),
            ("found", f"{begins[i]:,}, {what} it"),
        ],
    )


def _check_length(path: Path, names: Sequence[str], ends: I64, *, data_start: int, file_bytes: int) -> None:
    """The file must end where its last tensor does."""
    wanted = data_start + int(ends[-1])
    if file_bytes == wanted:
        return
    rows = [
        ("file", str(path)),
        ("expected", f"{wanted:,} bytes (header {data_start:,}, tensors {int(ends[-1]):,})"),
        ("found", f"{file_bytes:,} bytes"),
    ]
    if file_bytes > wanted:
        raise _damaged(path, f"{path.name} has {file_bytes - wanted:,} bytes after its last tensor.", rows)
    cut = names[int(np.searchsorted(ends, file_bytes - data_start, side="right"))]
    layer = layer_of(cut)
    part = f"part of layer {layer} is missing" if layer is not None else f"part of {cut} is missing"
    rows.append(("first tensor not whole", cut))
    raise _damaged(path, f"{path.name} ends {wanted - file_bytes:,} bytes early; {part}.", rows)


def _bad_json(path: Path, what: str) -> CheckpointError:
    return _damaged(
        path,
        f"The header of {path.name} is not valid: {what}.",
        [("file", str(path)), ("expected", "a JSON object of tensors"), ("found", what)],
    )


def _bad_tensor(path: Path, name: str, *, expected: str, found: str) -> CheckpointError:
    return _damaged(
        path,
        f"The header of {path.name} describes a tensor that can't be: {name}.",
        [("file", str(path)), *_tensor_rows(name), ("expected", expected), ("found", found)],
    )


def _tensor_rows(name: str) -> list[tuple[str, str]]:
    layer = layer_of(name)
    return [("tensor", name)] if layer is None else [("layer", str(layer)), ("tensor", name)]


def _damaged(path: Path, headline: str, rows: list[tuple[str, str]]) -> CheckpointError:
    return CheckpointError(headline, evidence=rows, remedies=fetch_again(path))
