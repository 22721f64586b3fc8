"""The packed form of bf16 rows: lossless, fixed rate, multiplied without expansion.

A bf16 value is a sign, 8 bits of exponent, 7 of mantissa. Exponents of trained weights carry about 2.6
bits of information, so a block (a run of whole rows) keeps, for each value, one byte of mantissa and
sign and a code of 3 or 4 bits for the exponent. The last code is an escape: its exponent stands in a list,
in order, and needs no position. Everything here is numpy and is the definition; native/packed.h equals it.

A block's bytes, little-endian, U = ceil(cols / 64) units of 64 columns in a row, b = bits of a code:

    0     64   header: "TwP1", u8 b, u8 marker, u16 0, u32 rows, u32 cols, 16 exponents by code (the
               escape's is `marker`, which is no other code's exponent; 3-bit tables stand twice),
               u32 number of escapes, zeros
    64    ...  u32 [rows + 1]: the first escape of each row; zeros to a multiple of 64
          ...  rows * U * 64 bytes: mantissa << 1 | sign
          ...  rows * U * 8b bytes: codes of a unit as one string of bits, the lowest first
          ...  escaped exponents, a byte each, in the order of rows, units, places
          64   zeros, so that a vector may be read past any of these

In a unit column 32h + 8i + j has place 16i + 8h + j (h < 2, i < 4, j < 8): interleaving the two bytes of a
value inside 16-byte lanes then gives columns in their order. Columns past the last are zeros of code 0.
"""

from __future__ import annotations

import struct

import numpy as np
from numpy.typing import NDArray

from twoends.kernels.ops import Bytes

U16 = NDArray[np.uint16]

UNIT = 64
MAGIC = b"TwP1"
_HEADER = struct.Struct("<4sBBHII16sI28x")
_PAD = 64
_BITS = (3, 4)
# numpy temporaries of one step stay near this many values.
_VALUES_AT_ONCE = 1 << 17


def pack_rows(words_RC: U16) -> Bytes | None:
    """The packed block of these rows; None where it would not be smaller than the rows themselves."""
    rows, cols = words_RC.shape
    units = -(-cols // UNIT)
    counts = np.zeros(256, np.int64)
    for part in _parts(words_RC):
        counts += np.bincount((part >> 7 & 0xFF).astype(np.uint8).reshape(-1), minlength=256)
    order = np.argsort(-counts, kind="stable")
    sizes = {}
    for bits in _BITS:
        escapes = int(counts.sum() - counts[order[: (1 << bits) - 1]].sum())
        sizes[bits] = _places(rows, units, bits, escapes)[-1]
    bits = min(_BITS, key=lambda b: sizes[b])
    if sizes[bits] >= words_RC.nbytes:
        return None
    return _encode(words_RC, bits, order, counts)


def unpack_rows(data: Bytes, *, rows: int, cols: int) -> U16:
    """The words of a packed block. Raises ValueError for bytes that are no block of this shape."""
    bits, marker, table, num_escapes = _read_header(data, rows, cols)
    units = -(-cols // UNIT)
    at_starts, at_low, at_codes, at_escapes, end = _places(rows, units, bits, num_escapes)
    if data.size != end:
        raise ValueError(f"a packed block of {end} bytes has {data.size}")
    starts = data[at_starts : at_starts + 4 * (rows + 1)].view("<u4")
    if starts[0] != 0 or starts[-1] != num_escapes or (np.diff(starts.astype(np.int64)) < 0).any():
        raise ValueError("a packed block's list of escapes is out of order")
    low = data[at_low:at_codes].reshape(rows, units, UNIT)
    codes = data[at_codes:at_escapes].reshape(rows, units, 8 * bits)
    words_RC = np.empty((rows, cols), np.uint16)
    step = max(1, _VALUES_AT_ONCE // (units * UNIT))
    for first in range(0, rows, step):
        last = min(first + step, rows)
        exponents = table[_spread(codes[first:last], bits)]
        escaped = exponents == marker
        listed = data[at_escapes + int(starts[first]) : at_escapes + int(starts[last])]
        if np.count_nonzero(escaped) != listed.size:
            raise ValueError("a packed block lists another number of escapes than its codes have")
        exponents[escaped] = listed
        both: U16 = exponents.astype(np.uint16) << np.uint16(8) | low[first:last]
        words = _to_columns(_rotated(both, 15)).reshape(last - first, units * UNIT)
        words_RC[first:last] = words[:, :cols]
    return words_RC


def check_header(data: Bytes, *, rows: int, cols: int) -> int:
    """Bits of a code of the packed block in `data`. Raises ValueError for a header of another shape."""
    return _read_header(data, rows, cols)[0]


def _encode(words_RC: U16, bits: int, order: NDArray[np.int64], counts: NDArray[np.int64]) -> Bytes:
    rows, cols = words_RC.shape
    units = -(-cols // UNIT)
    escape = (1 << bits) - 1
    known = [int(e) for e in order[:escape] if counts[e]]
    marker = next(e for e in range(256) if e not in known)
    by_code = np.full(escape + 1, known[0], np.uint8)
    by_code[: len(known)] = known
    by_code[escape] = marker
    code_of = np.full(256, escape, np.uint8)
    code_of[known] = np.arange(len(known))
    at_starts, at_low, at_codes, at_escapes, end = _places(
        rows, units, bits, int(counts.sum() - counts[known].sum())
    )
    data = np.zeros(end, np.uint8)
    low = data[at_low:at_codes].reshape(rows, units, UNIT)
    codes = data[at_codes:at_escapes].reshape(rows, units, 8 * bits)
    starts = data[at_starts : at_starts + 4 * (rows + 1)].view("<u4")
    step = max(1, _VALUES_AT_ONCE // (units * UNIT))
    count = 0
    for first in range(0, rows, step):
        last = min(first + step, rows)
        # Padding is the first known exponent with nothing else, so that it is never an escape.
        words = np.full((last - first, units * UNIT), known[0] << 7, np.uint16)
        words[:, :cols] = words_RC[first:last]
        placed = _to_places(_rotated(words, 1).reshape(last - first, units, UNIT))
        exponents = (placed >> 8).astype(np.uint8)
        low[first:last] = placed.astype(np.uint8)
        chosen = code_of[exponents]
        codes[first:last] = _squeeze(chosen, bits)
        escaped = chosen == escape
        listed = exponents[escaped]
        ends = np.cumsum(np.count_nonzero(escaped, axis=(1, 2)))
        starts[first + 1 : last + 1] = count + ends
        data[at_escapes + count : at_escapes + count + listed.size] = listed
        count += listed.size
    table = by_code.tobytes() * (16 >> bits)
    header = _HEADER.pack(MAGIC, bits, marker, 0, rows, cols, table, count)
    data[: len(header)] = np.frombuffer(header, np.uint8)
    return data


def _read_header(data: Bytes, rows: int, cols: int) -> tuple[int, int, Bytes, int]:
    """(bits, marker, exponent of every code, number of escapes)."""
    if data.size < _HEADER.size + _PAD:
        raise ValueError(f"a packed block has {data.size} bytes, less than its header")
    magic, bits, marker, _, has_rows, has_cols, table, count = _HEADER.unpack(data[: _HEADER.size].tobytes())
    if magic != MAGIC or bits not in _BITS:
        raise ValueError("these bytes are no packed block")
    if (has_rows, has_cols) != (rows, cols):
        raise ValueError(f"a packed block of {has_rows} x {has_cols} stands where {rows} x {cols} should be")
    return bits, marker, np.frombuffer(table, np.uint8), count


def _places(rows: int, units: int, bits: int, escapes: int) -> tuple[int, int, int, int, int]:
    """Where row starts, low bytes, codes and escapes begin, and the size of the block."""
    at_low = _HEADER.size + -(-4 * (rows + 1) // 64) * 64
    at_codes = at_low + rows * units * UNIT
    at_escapes = at_codes + rows * units * 8 * bits
    return _HEADER.size, at_low, at_codes, at_escapes, at_escapes + escapes + _PAD


def _parts(words_RC: U16) -> list[U16]:
    step = max(1, _VALUES_AT_ONCE // words_RC.shape[1])
    return [words_RC[first : first + step] for first in range(0, words_RC.shape[0], step)]


def _rotated(words: U16, left: int) -> U16:
    turned: U16 = (words << np.uint16(left)) | (words >> np.uint16(16 - left))
    return turned


def _to_places(by_column: U16) -> U16:
    """[rows, units, column in the unit] -> [rows, units, place]."""
    split = by_column.reshape(*by_column.shape[:2], 2, 4, 8)
    return np.ascontiguousarray(split.swapaxes(2, 3)).reshape(by_column.shape)


def _to_columns(by_place: U16) -> U16:
    split = by_place.reshape(*by_place.shape[:2], 4, 2, 8)
    return np.ascontiguousarray(split.swapaxes(2, 3)).reshape(by_place.shape)


def _squeeze(codes: Bytes, bits: int) -> Bytes:
    """[rows, units, 64] codes, a byte each -> [rows, units, 8 * bits] bytes: eight codes in `bits` bytes."""
    words = codes.view("<u8")
    for step, mask in _FOLDS[bits]:
        words = (words | words >> np.uint64(step)) & np.uint64(mask)
    eights = words[..., None].view(np.uint8)[..., :bits]
    return eights.reshape(*codes.shape[:2], 8 * bits)


def _spread(squeezed: Bytes, bits: int) -> Bytes:
    """The reverse of `_squeeze`."""
    shape = squeezed.shape
    eights = np.zeros((*shape[:2], 8, 8), np.uint8)
    eights[..., :bits] = squeezed.reshape(*shape[:2], 8, bits)
    words = eights.view("<u8")[..., 0]
    mask_of_one = np.uint64(int.from_bytes(bytes([(1 << bits) - 1]) * 8, "little"))
    masks = [mask for _, mask in _FOLDS[bits]][-2::-1]
    steps = [step for step, _ in _FOLDS[bits]][::-1]
    for step, mask in zip(steps, [*masks, int(mask_of_one)], strict=True):
        words = (words | words << np.uint64(step)) & np.uint64(mask)
    return words.view(np.uint8).reshape(*shape[:2], UNIT)


# How the eight codes of a 64-bit word are pushed together, two, four and eight at a time.
_FOLDS: dict[int, tuple[tuple[int, int], ...]] = {
    3: ((5, 0x003F003F003F003F), (10, 0x00000FFF00000FFF), (20, 0x0000000000FFFFFF)),
    4: ((4, 0x00FF00FF00FF00FF), (8, 0x0000FFFF0000FFFF), (16, 0x00000000FFFFFFFF)),
}
