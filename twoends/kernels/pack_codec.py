"""The packed form of bf16 rows: lossless, in levels of short codes, multiplied without expansion.

A bf16 value is a sign, 8 bits of exponent, 7 of mantissa. Exponents of trained weights carry about 2.6
bits of information, so a block (a run of whole rows) keeps, for each value, one byte of mantissa and
sign, and its exponent in levels. Level 1 has a code of b1 bits for every value; the last code is an escape,
whose exponents stand in a list, in order, and need no position. Level 2 codes the list of level 1 with b2
bits, level 3 that of level 2; what escapes from the last level is listed as it is, a byte each. Widths:

    fixed     (3) or (4)                                    one level, 0.70 to 0.75 of the bytes
    entropy   those, (2), (2, 3), (2, 4), (3, 3), (2, 2, 3) 0.66 to 0.68

whichever is smallest for the block. Everything here is numpy and is the definition; native/packed.h equals
it. A block's bytes, little-endian, U = ceil(cols / 64) units of 64 columns in a row, L levels:

    0     128  header: "TwP2", u8 L, u8 [3] widths, u32 rows, u32 cols, u32 [3] lengths of the lists (of a
               coded list in groups of 8 codes, of the last in bytes), u8 [3] markers, zeros to 64; then for
               each of three levels 16 exponents by code (the escape's is the level's marker, which is no
               other code's exponent; tables of 2 and 3 bits are repeated), zeros
    128   ...  u32 [L, rows + 1]: where each row begins in each list; zeros to a multiple of 64
          ...  rows * U * 64 bytes: mantissa << 1 | sign
          ...  rows * U * 8 b1 bytes: codes of a unit as one string of bits, the lowest first
          ...  the coded lists: of a row whole groups of 8 codes in b bytes, filled with code 0
          ...  the last list: escaped exponents
          64   zeros, so that a vector may be read past any of these

In a unit column 32h + 8i + j has place 16i + 8h + j (h < 2, i < 4, j < 8): interleaving the two bytes of a
value inside 16-byte lanes then gives columns in their order. Lists are in the order of rows, units, places.
Columns past the last are zeros of code 0.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from twoends.kernels.ops import Bytes
from twoends.kernels.pack_bits import U16, rotated, spread, squeeze, to_columns, to_places

Code = Literal["fixed", "entropy"]

UNIT = 64
MAGIC = b"TwP2"
_HEADER = struct.Struct("<4sB3sII3I3s33x48s16x")
_PAD = 64
_GROUP = 8
_MOST_LEVELS = 3
_WIDTHS: dict[Code, tuple[tuple[int, ...], ...]] = {
    "fixed": ((3,), (4,)),
    "entropy": ((3,), (4,), (2,), (2, 3), (2, 4), (2, 2, 3), (3, 3)),
}
# (2, 2, 3) where the third has nothing to code.
_ALL_WIDTHS = {*_WIDTHS["entropy"], (2, 2)}
# numpy temporaries of one step stay near this many values.
_VALUES_AT_ONCE = 1 << 17


@dataclass(frozen=True, slots=True, kw_only=True)
class _Level:
    """One level: bits of its codes, the exponent of every code, and the exponent that marks its escape."""

    bits: int
    exponents: Bytes
    marker: int

    @property
    def escape(self) -> int:
        """The last code."""
        return (1 << self.bits) - 1

    def encode(self, exponents: Bytes) -> Bytes:
        """The code of each exponent."""
        code_of = np.full(256, self.escape, np.uint8)
        # The first of equal exponents counts: what is not used repeats code 0.
        code_of[self.exponents[: self.escape][::-1]] = np.arange(self.escape, dtype=np.uint8)[::-1]
        chosen: Bytes = code_of[exponents]
        return chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class _Form:
    """What a header says, and where the parts of the block lie: `lists` are (begin, groups or bytes)."""

    rows: int
    cols: int
    levels: tuple[_Level, ...]
    lengths: tuple[int, ...]

    @property
    def units(self) -> int:
        """Units of 64 columns in a row."""
        return -(-self.cols // UNIT)

    @property
    def low_at(self) -> int:
        """Where the bytes of mantissa and sign begin."""
        return _HEADER.size + -(-4 * len(self.levels) * (self.rows + 1) // 64) * 64

    @property
    def codes_at(self) -> int:
        """Where the codes of the first level begin."""
        return self.low_at + self.rows * self.units * UNIT

    @property
    def lists_at(self) -> list[int]:
        """Where each list begins, and the end of the last."""
        places = [self.codes_at + self.rows * self.units * UNIT // 8 * self.levels[0].bits]
        for level, groups in zip(self.levels[1:], self.lengths, strict=False):
            places.append(places[-1] + groups * level.bits)
        return [*places, places[-1] + self.lengths[-1]]

    @property
    def size(self) -> int:
        """Bytes of the block."""
        return self.lists_at[-1] + _PAD

    def header(self) -> bytes:
        """The first bytes of the block."""
        fill = _MOST_LEVELS - len(self.levels)
        return _HEADER.pack(
            MAGIC,
            len(self.levels),
            bytes(level.bits for level in self.levels),
            self.rows,
            self.cols,
            *self.lengths,
            *[0] * fill,
            bytes(level.marker for level in self.levels),
            b"".join(level.exponents.tobytes() * (16 >> level.bits) for level in self.levels),
        )


def pack_rows(words_RC: U16, *, code: Code = "fixed") -> Bytes | None:
    """The packed block of these rows; None where it would not be smaller than the rows themselves."""
    counts = np.zeros(256, np.int64)
    for part in _parts(words_RC):
        counts += np.bincount((part >> 7 & 0xFF).astype(np.uint8).reshape(-1), minlength=256)
    order = np.argsort(-counts, kind="stable")
    ranked = counts[order]
    widths = min(_WIDTHS[code], key=lambda bits: _bits_of(bits, ranked, words_RC.shape[0]))
    if _bits_of(widths, ranked, words_RC.shape[0]) // 8 + words_RC.size >= words_RC.nbytes:
        return None
    data = _encode(words_RC, _levels(widths, order[: np.count_nonzero(counts)]))
    return data if data.size < words_RC.nbytes else None


def unpack_rows(data: Bytes, *, rows: int, cols: int) -> U16:
    """The words of a packed block. Raises ValueError for bytes that are no block of this shape."""
    form = _read_header(data, rows, cols)
    if data.size != form.size:
        raise ValueError(f"a packed block of {form.size} bytes has {data.size}")
    starts = _read_starts(data, form)
    low = data[form.low_at : form.codes_at].reshape(rows, form.units, UNIT)
    codes = data[form.codes_at : form.lists_at[0]].reshape(rows * form.units * 8, -1)
    words_RC = np.empty((rows, cols), np.uint16)
    step = max(1, _VALUES_AT_ONCE // (form.units * UNIT))
    for first in range(0, rows, step):
        last = min(first + step, rows)
        groups = codes[first * form.units * 8 : last * form.units * 8]
        counts = np.full(last - first, form.units * 8)
        exponents = _expand(data, form, 0, groups, counts, starts[:, first : last + 1])
        shaped = exponents.reshape(last - first, form.units, UNIT)
        both: U16 = shaped.astype(np.uint16) << np.uint16(8) | low[first:last]
        words = to_columns(rotated(both, 15)).reshape(last - first, form.units * UNIT)
        words_RC[first:last] = words[:, :cols]
    return words_RC


def widths_of(data: Bytes, *, rows: int, cols: int) -> tuple[int, ...]:
    """Bits of each level of the packed block in `data`. Raises ValueError for a header of another shape."""
    return tuple(level.bits for level in _read_header(data, rows, cols).levels)


def _bits_of(widths: tuple[int, ...], ranked: NDArray[np.int64], rows: int) -> int:
    """About the bits that exponents take whose counts, the most frequent first, are `ranked`."""
    bits = seen = 0
    for width in widths:
        bits += width * int(ranked[seen:].sum()) + 32 * rows + (rows * width * _GROUP // 2 if seen else 0)
        seen += (1 << width) - 1
    return bits + 8 * int(ranked[seen:].sum())


def _levels(widths: tuple[int, ...], order: NDArray[np.int64]) -> tuple[_Level, ...]:
    """The levels of these widths over the exponents that occur, the most frequent first."""
    levels: list[_Level] = []
    seen = 0
    for bits in widths:
        known = order[seen : seen + (1 << bits) - 1].astype(np.uint8)
        # A list that would be empty is no level.
        if levels and not known.size:
            break
        seen += known.size
        marker = next(e for e in range(256) if e not in known)
        by_code = np.full(1 << bits, known[0], np.uint8)
        by_code[: known.size] = known
        by_code[-1] = marker
        levels.append(_Level(bits=bits, exponents=by_code, marker=marker))
    return tuple(levels)


def _encode(words_RC: U16, levels: tuple[_Level, ...]) -> Bytes:
    rows, cols = words_RC.shape
    units = -(-cols // UNIT)
    first_exponent = int(levels[0].exponents[0])
    low = np.empty((rows, units, UNIT), np.uint8)
    codes = np.empty((rows * units * 8, levels[0].bits), np.uint8)
    counts = np.empty(rows, np.int64)
    listed: list[Bytes] = []
    step = max(1, _VALUES_AT_ONCE // (units * UNIT))
    for first in range(0, rows, step):
        last = min(first + step, rows)
        # Padding is the first known exponent with nothing else, so that it is never an escape.
        words = np.full((last - first, units * UNIT), first_exponent << 7, np.uint16)
        words[:, :cols] = words_RC[first:last]
        placed = to_places(rotated(words, 1).reshape(last - first, units, UNIT))
        exponents = (placed >> 8).astype(np.uint8)
        low[first:last] = placed.astype(np.uint8)
        chosen = levels[0].encode(exponents)
        codes[first * units * 8 : last * units * 8] = squeeze(chosen, levels[0].bits)
        escaped = chosen == levels[0].escape
        listed.append(exponents[escaped])
        counts[first:last] = np.count_nonzero(escaped, axis=(1, 2))
    lists, starts = _encode_lists(np.concatenate(listed), counts, levels)
    form = _Form(rows=rows, cols=cols, levels=levels, lengths=tuple(int(s[-1]) for s in starts))
    data = np.zeros(form.size, np.uint8)
    data[: _HEADER.size] = np.frombuffer(form.header(), np.uint8)
    _put(data, _HEADER.size, np.concatenate(starts).astype("<u4"))
    _put(data, form.low_at, low)
    _put(data, form.codes_at, codes)
    for at, part in zip(form.lists_at, lists, strict=False):
        _put(data, at, part)
    return data


def _encode_lists(
    listed: Bytes, counts: NDArray[np.int64], levels: tuple[_Level, ...]
) -> tuple[list[Bytes], list[NDArray[np.int64]]]:
    """Every list as its bytes, and where each row begins in it; `counts` are of `listed` by row."""
    lists: list[Bytes] = []
    starts: list[NDArray[np.int64]] = []
    for level in levels[1:]:
        groups = -(-counts // _GROUP)
        begins = _starts(groups)
        room = np.full(int(begins[-1]) * _GROUP, level.exponents[0], np.uint8)
        room[_positions(begins[:-1] * _GROUP, counts)] = listed
        chosen = level.encode(room)
        lists.append(squeeze(chosen, level.bits))
        starts.append(begins)
        escaped = chosen == level.escape
        row_of_group = np.repeat(np.arange(len(counts)), groups)
        in_group = np.count_nonzero(escaped.reshape(-1, _GROUP), axis=1)
        counts = np.bincount(row_of_group, weights=in_group, minlength=len(counts)).astype(np.int64)
        listed = room[escaped]
    return [*lists, listed], [*starts, _starts(counts)]


def _expand(
    data: Bytes,
    form: _Form,
    depth: int,
    groups: Bytes,
    counts: NDArray[np.int64],
    starts: NDArray[np.int64],
) -> Bytes:
    """The exponents of a run of rows at one level.

    `groups` [all, bits] are their codes, `counts` of them by row; `starts` [levels, rows + 1] is where the
    rows begin in the lists. Raises ValueError.
    """
    level = form.levels[depth]
    exponents: Bytes = level.exponents[spread(groups, level.bits)]
    escaped = exponents == level.marker
    at, begin, end = form.lists_at[depth], int(starts[depth, 0]), int(starts[depth, -1])
    if depth + 1 == len(form.levels):
        listed = data[at + begin : at + end]
    else:
        bits = form.levels[depth + 1].bits
        inner = data[at + begin * bits : at + end * bits].reshape(-1, bits)
        inner_counts = np.diff(starts[depth])
        room = _expand(data, form, depth + 1, inner, inner_counts, starts)
        row_of_group = np.repeat(np.arange(len(counts)), counts)
        in_group = np.count_nonzero(escaped.reshape(-1, _GROUP), axis=1)
        used = np.bincount(row_of_group, weights=in_group, minlength=len(counts)).astype(np.int64)
        if (-(-used // _GROUP) != inner_counts).any():
            raise ValueError(_OTHER_NUMBER)
        listed = room[_positions((starts[depth, :-1] - starts[depth, 0]) * _GROUP, used)]
    if np.count_nonzero(escaped) != listed.size:
        raise ValueError(_OTHER_NUMBER)
    exponents[escaped] = listed
    return exponents


_OTHER_NUMBER = "a packed block lists another number of escapes than its codes have"


def _read_header(data: Bytes, rows: int, cols: int) -> _Form:
    if data.size < _HEADER.size + _PAD:
        raise ValueError(f"a packed block has {data.size} bytes, less than its header")
    found = _HEADER.unpack(data[: _HEADER.size].tobytes())
    magic, num_levels, widths, has_rows, has_cols, *lengths, markers, tables = found
    widths = tuple(widths[:num_levels])
    if magic != MAGIC or num_levels > _MOST_LEVELS or widths not in _ALL_WIDTHS:
        raise ValueError("these bytes are no packed block")
    if (has_rows, has_cols) != (rows, cols):
        raise ValueError(f"a packed block of {has_rows} x {has_cols} stands where {rows} x {cols} should be")
    levels = tuple(
        _Level(
            bits=bits, exponents=np.frombuffer(tables[16 * i : 16 * i + (1 << bits)], np.uint8), marker=mark
        )
        for i, (bits, mark) in enumerate(zip(widths, markers, strict=False))
    )
    return _Form(rows=rows, cols=cols, levels=levels, lengths=tuple(lengths[:num_levels]))


def _read_starts(data: Bytes, form: _Form) -> NDArray[np.int64]:
    count = len(form.levels) * (form.rows + 1)
    starts: NDArray[np.int64] = data[_HEADER.size : _HEADER.size + 4 * count].view("<u4").astype(np.int64)
    starts = starts.reshape(len(form.levels), -1)
    if starts[:, 0].any() or (starts[:, -1] != form.lengths).any() or (np.diff(starts) < 0).any():
        raise ValueError("a packed block's list of escapes is out of order")
    return starts


def _starts(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])


def _positions(begins: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """begins[r], begins[r] + 1, ... counts[r] of them, for every row r."""
    within = np.arange(int(counts.sum())) - np.repeat(_starts(counts)[:-1], counts)
    positions: NDArray[np.int64] = np.repeat(begins, counts) + within
    return positions


def _put(data: Bytes, at: int, part: NDArray[np.generic]) -> None:
    data[at : at + part.nbytes] = part.reshape(-1).view(np.uint8)


def _parts(words_RC: U16) -> Iterator[U16]:
    step = max(1, _VALUES_AT_ONCE // words_RC.shape[1])
    for first in range(0, words_RC.shape[0], step):
        yield words_RC[first : first + step]
