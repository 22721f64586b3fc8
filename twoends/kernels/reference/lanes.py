"""The 16 lanes: how a row is walked, and how lanes become one number."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from twoends.kernels.ops import F32, Matrix
from twoends.kernels.pack_codec import unpack_rows
from twoends.kernels.reference.fma import fma

LANES = 16
GROUP = 32


def reduce_lanes(acc: NDArray[np.floating]) -> NDArray[np.floating]:
    """Last axis 16 -> 1: the upper half is added to the lower half, four times."""
    width = LANES
    while width > 1:
        width //= 2
        acc = acc[..., :width] + acc[..., width : 2 * width]
    return acc[..., 0]


def padded_groups(x: F32) -> F32:
    """Last axis padded with zeros to whole groups and split: [..., groups, lane, even/odd]."""
    size = x.shape[-1]
    groups = -(-size // GROUP)
    full = np.zeros((*x.shape[:-1], groups * GROUP), np.float32)
    full[..., :size] = x
    return full.reshape(*x.shape[:-1], groups, LANES, 2)


def decode(matrix: Matrix) -> F32:
    """The exact values of a bf16, f32 or packed matrix, [rows, cols]."""
    if matrix.format == "f32":
        return matrix.data.view(np.float32).reshape(matrix.rows, matrix.cols)
    if matrix.format == "bf16":
        bits = matrix.data.view(np.uint16).astype(np.uint32) << 16
        return bits.view(np.float32).reshape(matrix.rows, matrix.cols)
    if matrix.format == "packed":
        words = unpack_rows(matrix.data, rows=matrix.rows, cols=matrix.cols)
        return (words.astype(np.uint32) << 16).view(np.float32)
    raise AssertionError(f"a {matrix.format} matrix has no plain values")


def dot(w: F32, x: F32) -> F32:
    """sum(w * x) over the last axis, in the order of the contract; the other axes broadcast."""
    w_groups, x_groups = padded_groups(w), padded_groups(x)
    shape = np.broadcast_shapes(w_groups.shape[:-3], x_groups.shape[:-3])
    acc = np.zeros((*shape, LANES), np.float32)
    for g in range(w_groups.shape[-3]):
        acc = fma(w_groups[..., g, :, 0], x_groups[..., g, :, 0], acc)
        acc = fma(w_groups[..., g, :, 1], x_groups[..., g, :, 1], acc)
    return np.asarray(reduce_lanes(acc))


def sum_of_squares(x: F32) -> NDArray[np.float64]:
    """sum(x * x) over the last axis in binary64, same lanes and reduction (each square is exact)."""
    groups = padded_groups(x).astype(np.float64)
    acc = np.zeros((*x.shape[:-1], LANES), np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        for g in range(groups.shape[-3]):
            acc = acc + groups[..., g, :, 0] * groups[..., g, :, 0]
            acc = acc + groups[..., g, :, 1] * groups[..., g, :, 1]
        return np.asarray(reduce_lanes(acc))
