"""The packed form of bf16 rows: lossless, exponents in levels of short codes, multiplied without expansion.

A bf16 value is a sign, 8 bits of exponent, 7 of mantissa. Exponents of trained weights carry about 2.6
bits of information, so a block (a run of whole rows) keeps, for each value, one byte of mantissa and
sign as it is (mantissa << 1 | sign), and codes the exponents (pack_levels.py says how). Widths:

    fixed     (3) or (4)                                    one level, 0.70 to 0.75 of the bytes
    entropy   those, (2), (2, 3), (2, 4), (3, 3), (2, 2, 3) 0.66 to 0.68

whichever is smallest for the block. Its magic is "TwP2". In a unit column 32h + 8i + j has place 16i + 8h + j
(h < 2, i < 4, j < 8): interleaving the two bytes of a value inside 16-byte lanes then gives columns in their
order. Bytes and lists are in the order of rows, units, places. Columns past the last are zeros of code 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np

from twoends.kernels.ops import Bytes
from twoends.kernels.pack_bits import U16, rotated, squeeze, to_columns, to_places
from twoends.kernels.pack_levels import (
    UNIT,
    Form,
    Level,
    Widths,
    bits_of,
    encode_lists,
    expand,
    levels_of,
    ranked,
    read_form,
    read_starts,
)

Code = Literal["fixed", "entropy"]

MAGIC = b"TwP2"
_WIDTHS: dict[Code, tuple[Widths, ...]] = {
    "fixed": ((3,), (4,)),
    "entropy": ((3,), (4,), (2,), (2, 3), (2, 4), (2, 2, 3), (3, 3)),
}
# (2, 2, 3) where the third has nothing to code.
_ALL_WIDTHS: set[Widths] = {*_WIDTHS["entropy"], (2, 2)}
# numpy temporaries of one step stay near this many values.
_VALUES_AT_ONCE = 1 << 17


def pack_rows(words_RC: U16, *, code: Code = "entropy") -> Bytes | None:
    """The packed block of these rows; None where it would not be smaller than the rows themselves."""
    rows = words_RC.shape[0]
    counts = np.zeros(256, np.int64)
    for part in _parts(words_RC):
        counts += np.bincount((part >> 7 & 0xFF).astype(np.uint8).reshape(-1), minlength=256)
    order, often = ranked(counts)
    widths = min(_WIDTHS[code], key=lambda widths: bits_of(widths, often, rows))
    if bits_of(widths, often, rows) // 8 + words_RC.size >= words_RC.nbytes:
        return None
    data = _encode(words_RC, levels_of(widths, order))
    return data if data.size < words_RC.nbytes else None


def unpack_rows(data: Bytes, *, rows: int, cols: int) -> U16:
    """The words of a packed block. Raises ValueError for bytes that are no block of this shape."""
    form = _read_form(data, rows, cols)
    starts = read_starts(data, form)
    low = data[form.low_at : form.codes_at].reshape(rows, form.units, UNIT)
    codes = data[form.codes_at : form.lists_at[0]].reshape(rows * form.units * 8, -1)
    words_RC = np.empty((rows, cols), np.uint16)
    step = max(1, _VALUES_AT_ONCE // (form.units * UNIT))
    for first in range(0, rows, step):
        last = min(first + step, rows)
        groups = codes[first * form.units * 8 : last * form.units * 8]
        counts = np.full(last - first, form.units * 8)
        exponents = expand(data, form, groups, counts, starts[:, first : last + 1])
        shaped = exponents.reshape(last - first, form.units, UNIT)
        both: U16 = shaped.astype(np.uint16) << np.uint16(8) | low[first:last]
        words = to_columns(rotated(both, 15)).reshape(last - first, form.units * UNIT)
        words_RC[first:last] = words[:, :cols]
    return words_RC


def widths_of(data: Bytes, *, rows: int, cols: int) -> Widths:
    """Bits of each level of the packed block in `data`. Raises ValueError for a block of another shape."""
    return tuple(level.bits for level in _read_form(data, rows, cols).levels)


def _encode(words_RC: U16, levels: tuple[Level, ...]) -> Bytes:
    rows, cols = words_RC.shape
    units = -(-cols // UNIT)
    first_exponent = int(levels[0].values[0])
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
    lists, starts = encode_lists(np.concatenate(listed), counts, levels)
    form = Form(
        magic=MAGIC,
        rows=rows,
        cols=cols,
        levels=levels,
        lengths=tuple(int(s[-1]) for s in starts),
        low_bytes=UNIT,
    )
    return form.whole(starts, low, codes, lists)


def _read_form(data: Bytes, rows: int, cols: int) -> Form:
    return read_form(data, magic=MAGIC, rows=rows, cols=cols, known=_ALL_WIDTHS, low_bytes=UNIT)


def _parts(words_RC: U16) -> Iterator[U16]:
    step = max(1, _VALUES_AT_ONCE // words_RC.shape[1])
    for first in range(0, words_RC.shape[0], step):
        yield words_RC[first : first + step]
