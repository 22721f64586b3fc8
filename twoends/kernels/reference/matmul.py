"""Matrix products: every output element is one dot in the order of the contract."""

from __future__ import annotations

import dataclasses

import numpy as np

from twoends.kernels.ops import F32, Matrix
from twoends.kernels.pack_codec import unpack_rows
from twoends.kernels.pack_scales import plain_scales
from twoends.kernels.reference.fma import fma
from twoends.kernels.reference.lanes import GROUP, LANES, decode, dot, padded_groups, reduce_lanes

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
SCALES = np.array([*(2.0 ** (byte - 127) for byte in range(255)), np.nan], np.float64).astype(np.float32)
# Bounds the temporary arrays of one step, so that the numpy path keeps a small peak too.
_ROWS_AT_ONCE = 4096


def matmul(matrix: Matrix, x_TX: F32, *, out_TY: F32, first_row: int) -> None:
    """out_TY[t, first_row + r] = dot(matrix[r], x_TX[t]); the rows given need not be the whole matrix."""
    if matrix.format == "packed":
        words = unpack_rows(matrix.data, rows=matrix.rows, cols=matrix.cols)
        data = words.reshape(-1).view(np.uint8)
        matrix = Matrix(format="bf16", rows=matrix.rows, cols=matrix.cols, data=data)
    if matrix.scale is not None:
        scale = plain_scales(matrix.scale, rows=matrix.rows, groups=matrix.cols // GROUP)
        matrix = dataclasses.replace(matrix, scale=scale.reshape(-1))
    product = _mxfp4_rows if matrix.format == "mxfp4" else _plain_rows
    for start in range(0, matrix.rows, _ROWS_AT_ONCE):
        stop = min(start + _ROWS_AT_ONCE, matrix.rows)
        part = row_slice(matrix, start, stop)
        for t in range(x_TX.shape[0]):
            out_TY[t, first_row + start : first_row + stop] = product(part, x_TX[t])


def row_slice(matrix: Matrix, start: int, stop: int) -> Matrix:
    """Rows start .. stop - 1 as a matrix over the same bytes; not of a packed one."""
    row_bytes = matrix.data.size // matrix.rows
    scale = None
    if matrix.scale is not None:
        scale_bytes = matrix.scale.size // matrix.rows
        scale = matrix.scale[start * scale_bytes : stop * scale_bytes]
    return Matrix(
        format=matrix.format,
        rows=stop - start,
        cols=matrix.cols,
        data=matrix.data[start * row_bytes : stop * row_bytes],
        scale=scale,
    )


def _plain_rows(matrix: Matrix, x_X: F32) -> F32:
    return dot(decode(matrix), x_X)


def _mxfp4_rows(matrix: Matrix, x_X: F32) -> F32:
    """Per group: p = fma(v1, x1, v0 * x0) on unscaled values, then acc = fma(p, scale, acc)."""
    assert matrix.scale is not None
    groups = matrix.cols // GROUP
    packed = matrix.data.reshape(matrix.rows, groups, LANES)
    scale = SCALES[matrix.scale.reshape(matrix.rows, groups)]
    x_groups = padded_groups(x_X)
    acc = np.zeros((matrix.rows, LANES), np.float32)
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        for g in range(groups):
            low, high = E2M1[packed[:, g] & 15], E2M1[packed[:, g] >> 4]
            p = fma(high, x_groups[g, :, 1], low * x_groups[g, :, 0])
            acc = fma(p, scale[:, g, None], acc)
        return np.asarray(reduce_lanes(acc), dtype=np.float32)
