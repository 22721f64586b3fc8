"""Levels of short codes: how bytes that are mostly a few values are coded in a block, and read back.

Level 1 has a code of b1 bits for every value; the last code is an escape, whose values stand in a list, in
order, and need no position. Level 2 codes the list of level 1 with b2 bits, level 3 that of level 2; what
escapes from the last level is listed as it is, a byte each. The values are in rows, whole units of 64 each,
and every row begins at a place of its own in every list. A block's bytes, little-endian, U units in a row,
L levels:

    0     128  header: 4 bytes of magic, u8 L, u8 [3] widths, u32 rows, u32 cols, u32 [3] lengths of the
               lists (of a coded list in groups of 8 codes, of the last in bytes), u8 [3] markers, zeros;
               at 64 for each of three levels 16 bytes, the value of each code, repeated (the escape's is the
               level's marker, which is no other code's value), zeros
    128   ...  u32 [L, rows + 1]: where each row begins in each list; zeros to a multiple of 64
          ...  rows * U * 64 bytes that are not coded, if this kind of block has any
          ...  rows * U * 8 b1 bytes: codes of a unit as one string of bits, the lowest first
          ...  the coded lists: of a row whole groups of 8 codes in b bytes, filled with code 0
          ...  the last list: escaped values
          64   zeros, so that a vector may be read past any of these

Values past the last column are code 0. This is the definition; native/packed_block.h and packed.h equal it.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from twoends.kernels.ops import Bytes
from twoends.kernels.pack_bits import spread, squeeze

UNIT = 64
Widths = tuple[int, ...]
Counts = NDArray[np.int64]

_HEADER = struct.Struct("<4sB3sII3I3s33x48s16x")
_PAD = 64
_GROUP = 8
_MOST_LEVELS = 3
_OTHER_NUMBER = "a packed block lists another number of escapes than its codes have"


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One level: bits of its codes, the value of every code, and the value that marks its escape."""

    bits: int
    values: Bytes
    marker: int

    @property
    def escape(self) -> int:
        """The last code."""
        return (1 << self.bits) - 1

    def encode(self, found: Bytes) -> Bytes:
        """The code of each value."""
        code_of = np.full(256, self.escape, np.uint8)
        # The first of equal values counts: what is not used repeats code 0.
        code_of[self.values[: self.escape][::-1]] = np.arange(self.escape, dtype=np.uint8)[::-1]
        chosen: Bytes = code_of[found]
        return chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """What a header says, and where the parts of the block lie. `low_bytes` of a unit are not coded."""

    magic: bytes
    rows: int
    cols: int
    levels: tuple[Level, ...]
    lengths: tuple[int, ...]
    low_bytes: int

    @property
    def units(self) -> int:
        """Units of 64 columns in a row."""
        return -(-self.cols // UNIT)

    @property
    def low_at(self) -> int:
        """Where the bytes that are not coded begin."""
        return _HEADER.size + -(-4 * len(self.levels) * (self.rows + 1) // 64) * 64

    @property
    def codes_at(self) -> int:
        """Where the codes of the first level begin."""
        return self.low_at + self.rows * self.units * self.low_bytes

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

    def whole(self, starts: list[Counts], low: Bytes | None, codes: Bytes, lists: list[Bytes]) -> Bytes:
        """The bytes of the block."""
        data = np.zeros(self.size, np.uint8)
        data[: _HEADER.size] = np.frombuffer(self._header(), np.uint8)
        _put(data, _HEADER.size, np.concatenate(starts).astype("<u4"))
        if low is not None:
            _put(data, self.low_at, low)
        _put(data, self.codes_at, codes)
        for at, part in zip(self.lists_at, lists, strict=False):
            _put(data, at, part)
        return data

    def _header(self) -> bytes:
        fill = _MOST_LEVELS - len(self.levels)
        return _HEADER.pack(
            self.magic,
            len(self.levels),
            bytes(level.bits for level in self.levels),
            self.rows,
            self.cols,
            *self.lengths,
            *[0] * fill,
            bytes(level.marker for level in self.levels),
            b"".join(level.values.tobytes() * (16 >> level.bits) for level in self.levels),
        )


def ranked(counts: Counts) -> tuple[Counts, Counts]:
    """The values that occur, the most frequent first, and how often each does."""
    order = np.argsort(-counts, kind="stable")[: np.count_nonzero(counts)]
    return order, counts[order]


def bits_of(widths: Widths, often: Counts, rows: int) -> int:
    """About the bits that levels of these widths take, `often` being how often each value occurs."""
    bits = seen = 0
    for width in widths:
        bits += width * int(often[seen:].sum()) + 32 * rows + (rows * width * _GROUP // 2 if seen else 0)
        seen += (1 << width) - 1
    return bits + 8 * int(often[seen:].sum())


def levels_of(widths: Widths, order: Counts) -> tuple[Level, ...]:
    """The levels of these widths over the values that occur, the most frequent first."""
    levels: list[Level] = []
    seen = 0
    for bits in widths:
        known = order[seen : seen + (1 << bits) - 1].astype(np.uint8)
        # A list that would be empty is no level.
        if levels and not known.size:
            break
        seen += known.size
        marker = next(value for value in range(256) if value not in known)
        by_code = np.full(1 << bits, known[0], np.uint8)
        by_code[: known.size] = known
        by_code[-1] = marker
        levels.append(Level(bits=bits, values=by_code, marker=marker))
    return tuple(levels)


def encode_lists(
    listed: Bytes, counts: Counts, levels: tuple[Level, ...]
) -> tuple[list[Bytes], list[Counts]]:
    """Every list as its bytes, and where each row begins in it; `counts` are of `listed` by row."""
    lists: list[Bytes] = []
    starts: list[Counts] = []
    for level in levels[1:]:
        groups = -(-counts // _GROUP)
        begins = _starts(groups)
        room = np.full(int(begins[-1]) * _GROUP, level.values[0], np.uint8)
        room[_positions(begins[:-1] * _GROUP, counts)] = listed
        chosen = level.encode(room)
        lists.append(squeeze(chosen, level.bits))
        starts.append(begins)
        escaped = chosen == level.escape
        counts = _count_by_row(escaped, groups)
        listed = room[escaped]
    return [*lists, listed], [*starts, _starts(counts)]


def expand(
    data: Bytes, form: Form, groups: Bytes, counts: Counts, starts: Counts, *, depth: int = 0
) -> Bytes:
    """The values of a run of rows at one level.

    `groups` [all, bits] are their codes, `counts` of them by row; `starts` [levels, rows + 1] is where the
    rows begin in the lists. Raises ValueError.
    """
    level = form.levels[depth]
    values: Bytes = level.values[spread(groups, level.bits)]
    escaped = values == level.marker
    at, begin, end = form.lists_at[depth], int(starts[depth, 0]), int(starts[depth, -1])
    if depth + 1 == len(form.levels):
        listed = data[at + begin : at + end]
    else:
        bits = form.levels[depth + 1].bits
        inner = data[at + begin * bits : at + end * bits].reshape(-1, bits)
        inner_counts = np.diff(starts[depth])
        room = expand(data, form, inner, inner_counts, starts, depth=depth + 1)
        used = _count_by_row(escaped, counts)
        if (-(-used // _GROUP) != inner_counts).any():
            raise ValueError(_OTHER_NUMBER)
        listed = room[_positions((starts[depth, :-1] - begin) * _GROUP, used)]
    if np.count_nonzero(escaped) != listed.size:
        raise ValueError(_OTHER_NUMBER)
    values[escaped] = listed
    return values


def read_form(data: Bytes, *, magic: bytes, rows: int, cols: int, known: set[Widths], low_bytes: int) -> Form:
    """The header of a block, which must be whole and of this shape. Raises ValueError."""
    if data.size < _HEADER.size + _PAD:
        raise ValueError(f"a packed block has {data.size} bytes, less than its header")
    found = _HEADER.unpack(data[: _HEADER.size].tobytes())
    has_magic, num_levels, widths, has_rows, has_cols, *lengths, markers, tables = found
    widths = tuple(widths[:num_levels])
    if has_magic != magic or num_levels > _MOST_LEVELS or widths not in known:
        raise ValueError("these bytes are no packed block")
    if (has_rows, has_cols) != (rows, cols):
        raise ValueError(f"a packed block of {has_rows} x {has_cols} stands where {rows} x {cols} should be")
    levels = tuple(
        Level(bits=bits, values=np.frombuffer(tables[16 * i : 16 * i + (1 << bits)], np.uint8), marker=mark)
        for i, (bits, mark) in enumerate(zip(widths, markers, strict=False))
    )
    form = Form(
        magic=magic,
        rows=rows,
        cols=cols,
        levels=levels,
        lengths=tuple(lengths[:num_levels]),
        low_bytes=low_bytes,
    )
    if data.size != form.size:
        raise ValueError(f"a packed block of {form.size} bytes has {data.size}")
    return form


def read_starts(data: Bytes, form: Form) -> Counts:
    """[levels, rows + 1]: where the rows begin in the lists. Raises ValueError."""
    count = len(form.levels) * (form.rows + 1)
    starts: Counts = data[_HEADER.size : _HEADER.size + 4 * count].view("<u4").astype(np.int64)
    starts = starts.reshape(len(form.levels), -1)
    if starts[:, 0].any() or (starts[:, -1] != form.lengths).any() or (np.diff(starts) < 0).any():
        raise ValueError("a packed block's list of escapes is out of order")
    return starts


def _count_by_row(escaped: NDArray[np.bool_], groups: Counts) -> Counts:
    """How many of each row's groups' values are set."""
    row_of_group = np.repeat(np.arange(len(groups)), groups)
    in_group = np.count_nonzero(escaped.reshape(-1, _GROUP), axis=1)
    return np.bincount(row_of_group, weights=in_group, minlength=len(groups)).astype(np.int64)


def _starts(counts: Counts) -> Counts:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])


def _positions(begins: Counts, counts: Counts) -> Counts:
    """begins[r], begins[r] + 1, ... counts[r] of them, for every row r."""
    within = np.arange(int(counts.sum())) - np.repeat(_starts(counts)[:-1], counts)
    positions: Counts = np.repeat(begins, counts) + within
    return positions


def _put(data: Bytes, at: int, part: NDArray[np.generic]) -> None:
    data[at : at + part.nbytes] = part.reshape(-1).view(np.uint8)
