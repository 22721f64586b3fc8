"""One routed expert as a block of a pack: its matrices in one piece, MXFP4 scales or bf16 rows coded.

    0    64   header: "TwX2", u32 number of parts, u32 [6] bytes of each, zeros
    64   ...  the parts in the order of names.expert_parts, each from a multiple of 64 on

A part has the source's bytes, or, where that is smaller, is the packed block of an MXFP4 matrix's scales
(kernels/pack_scales.py) or of a bf16 matrix's rows (kernels/pack_codec.py). Which of them its size says.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from twoends.checkpoint.names import ExpertFormat, TensorSpec
from twoends.kernels.ops import Bytes, ExpertWeights, Format, Matrix
from twoends.kernels.pack_codec import Code, pack_rows, unpack_rows
from twoends.kernels.pack_scales import pack_scales, unpack_scales

MAGIC = b"TwX2"
_MOST_PARTS = 6
_BORDER = 64


def encode_expert(data: Bytes, parts: Sequence[TensorSpec], expert_format: ExpertFormat, code: Code) -> Bytes:
    """The block of an expert whose tensors' bytes stand one after another in `data`."""
    pieces: list[Bytes] = []
    at = 0
    for i, part in enumerate(parts):
        pieces.append(_encode_part(data[at : at + part.nbytes], part, _is_scale(i, expert_format), code))
        at += part.nbytes
    starts, size = _places([piece.size for piece in pieces])
    block = np.zeros(size, np.uint8)
    sizes = [piece.size for piece in pieces] + [0] * (_MOST_PARTS - len(pieces))
    head = MAGIC + struct.pack("<7I", len(pieces), *sizes)
    block[: len(head)] = np.frombuffer(head, np.uint8)
    for start, piece in zip(starts, pieces, strict=True):
        block[start : start + piece.size] = piece
    return block


def decode_expert(block: Bytes, parts: Sequence[TensorSpec], expert_format: ExpertFormat) -> Bytes:
    """The reverse of `encode_expert`. Raises ValueError for bytes that are no such block."""
    found = []
    for i, (piece, part) in enumerate(zip(_pieces(block, parts), parts, strict=True)):
        rows, cols = part.shape
        if piece.size == part.nbytes:
            found.append(piece)
        elif _is_scale(i, expert_format):
            found.append(unpack_scales(piece, rows=rows, groups=cols).reshape(-1))
        else:
            found.append(unpack_rows(piece, rows=rows, cols=cols).reshape(-1).view(np.uint8))
    return np.concatenate(found)


def expert_matrices(block: Bytes, parts: Sequence[TensorSpec], expert_format: ExpertFormat) -> ExpertWeights:
    """The expert's matrices over the bytes of its block, as they are. Raises ValueError."""
    pieces = _pieces(block, parts)
    if expert_format == "mxfp4":
        w1, w2, w3 = (
            Matrix(
                format="mxfp4",
                rows=parts[i].shape[0],
                cols=parts[i].shape[1] * 2,
                data=pieces[i],
                scale=pieces[i + 1],
            )
            for i in (0, 2, 4)
        )
    else:
        w1, w2, w3 = (_plain_matrix(pieces[i], parts[i], expert_format) for i in range(3))
    return ExpertWeights(w1=w1, w2=w2, w3=w3)


def _plain_matrix(piece: Bytes, part: TensorSpec, form: Format) -> Matrix:
    rows, cols = part.shape
    return Matrix(format=form if piece.size == part.nbytes else "packed", rows=rows, cols=cols, data=piece)


def _encode_part(piece: Bytes, part: TensorSpec, is_scale: bool, code: Code) -> Bytes:
    packed = None
    if is_scale:
        packed = pack_scales(piece.reshape(part.shape))
    elif part.released == "BF16":
        packed = pack_rows(piece.view("<u2").reshape(part.shape), code=code)
    return piece if packed is None else packed


def _is_scale(i: int, expert_format: ExpertFormat) -> bool:
    return expert_format == "mxfp4" and i % 2 == 1


def _pieces(block: Bytes, parts: Sequence[TensorSpec]) -> list[Bytes]:
    head = block[: 8 + 4 * _MOST_PARTS].tobytes()
    if len(head) < 8 + 4 * _MOST_PARTS or head[:4] != MAGIC:
        raise ValueError("these bytes are no packed expert")
    count, *sizes = struct.unpack("<7I", head[4:])
    if count != len(parts):
        raise ValueError(f"a packed expert has {count} parts instead of {len(parts)}")
    starts, size = _places(sizes[:count])
    if size != block.size or any(n > part.nbytes for n, part in zip(sizes, parts, strict=False)):
        raise ValueError("a packed expert's parts have other sizes than its bytes")
    return [block[start : start + n] for start, n in zip(starts, sizes, strict=False)]


def _places(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where parts of these sizes begin, and where the last ends."""
    starts = []
    end = _BORDER
    for size in sizes:
        starts.append(-(-end // _BORDER) * _BORDER)
        end = starts[-1] + size
    return starts, end
