"""The packed form of MXFP4 scales: lossless, in levels of short codes (pack_levels.py).

A scale of a trained matrix carries about 0.7 bits of information in its 8. Rows are taken in strips, so that
a run of rows can be multiplied without the others: a strip is S rows, S the least multiple of 16 with
S * groups >= 1024. It is one row of the block, S * groups values; rows past the matrix's last are code 0.
The block's magic is "TwS2", it has no bytes that are not coded, and its widths are whichever of `_WIDTHS` is
smallest. A matrix's scales are packed exactly when they have fewer bytes than rows * groups.
"""

from __future__ import annotations

import numpy as np

from twoends.kernels.ops import Bytes
from twoends.kernels.pack_bits import squeeze
from twoends.kernels.pack_levels import (
    UNIT,
    Form,
    Widths,
    bits_of,
    encode_lists,
    expand,
    levels_of,
    ranked,
    read_form,
    read_starts,
)

MAGIC = b"TwS2"
_WIDTHS: set[Widths] = {(1,), (1, 1), (1, 2), (1, 1, 1), (1, 1, 2), (1, 2, 2), (2,), (2, 2), (2, 3), (3,)}
_STRIP_VALUES = 1024
_ROW_MULTIPLE = 16


def strip_rows(groups: int) -> int:
    """Rows of a strip of a matrix with `groups` scales a row."""
    return -(-_STRIP_VALUES // (groups * _ROW_MULTIPLE)) * _ROW_MULTIPLE


def pack_scales(scale_RG: Bytes) -> Bytes | None:
    """The packed block of these scales; None where it would not be smaller."""
    rows, groups = scale_RG.shape
    strips, cols = _shape(rows, groups)
    order, often = ranked(np.bincount(scale_RG.reshape(-1), minlength=256))
    widths = min(sorted(_WIDTHS), key=lambda widths: bits_of(widths, often, strips))
    levels = levels_of(widths, order)
    filler = levels[0].values[0]
    padded = np.full((strips, cols), filler, np.uint8)
    padded.reshape(-1)[: rows * groups] = scale_RG.reshape(-1)
    values = np.full((strips, -(-cols // UNIT) * UNIT), filler, np.uint8)
    values[:, :cols] = padded
    chosen = levels[0].encode(values)
    escaped = chosen == levels[0].escape
    lists, starts = encode_lists(values[escaped], np.count_nonzero(escaped, axis=1), levels)
    form = Form(
        magic=MAGIC,
        rows=strips,
        cols=cols,
        levels=levels,
        lengths=tuple(int(s[-1]) for s in starts),
        low_bytes=0,
    )
    if form.size >= scale_RG.size:
        return None
    return form.whole(starts, None, squeeze(chosen, levels[0].bits), lists)


def unpack_scales(data: Bytes, *, rows: int, groups: int) -> Bytes:
    """The scales [rows, groups] of a packed block. Raises ValueError for bytes of another shape."""
    strips, cols = _shape(rows, groups)
    form = read_form(data, magic=MAGIC, rows=strips, cols=cols, known=_WIDTHS, low_bytes=0)
    codes = data[form.codes_at : form.lists_at[0]].reshape(strips * form.units * 8, -1)
    values = expand(data, form, codes, np.full(strips, form.units * 8), read_starts(data, form))
    scale_RG: Bytes = values.reshape(strips, -1)[:, :cols].reshape(-1, groups)[:rows]
    return scale_RG


def plain_scales(scale: Bytes, *, rows: int, groups: int) -> Bytes:
    """Scales [rows, groups] of a matrix, packed or not. Raises ValueError."""
    if scale.size == rows * groups:
        return scale.reshape(rows, groups)
    return unpack_scales(scale, rows=rows, groups=groups)


def _shape(rows: int, groups: int) -> tuple[int, int]:
    """Strips of a matrix, and values of a strip."""
    strip = strip_rows(groups)
    return -(-rows // strip), strip * groups
