"""fma(a, b, c) in binary32, rounded once, with numpy, which has none.

The product of two binary32 numbers is exact in binary64. Their sum with c, rounded to binary64
and then to binary32, is rounded twice; that differs from one rounding only when the binary64
sum lies exactly on a tie between two binary32 numbers while the true sum does not. Those
elements are found by their bits, and there the sum is first rounded to odd.
"""

from __future__ import annotations

import numpy as np

from twoends.kernels.ops import F32

_TIE_BITS = np.int64(0x1000_0000)
_LOW_BITS = np.int64(0x1FFF_FFFF)
_SMALLEST_NORMAL = 2.0**-126


def fma(a: F32, b: F32 | np.float32, c: F32 | np.float32) -> F32:
    """round(a * b + c), elementwise with broadcasting; all binary32, subnormals kept."""
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        product = np.multiply(a, b, dtype=np.float64)
        total = product + c
        result = total.astype(np.float32)
        suspect = (total.view(np.int64) & _LOW_BITS) == _TIE_BITS
        suspect |= np.abs(total) < _SMALLEST_NORMAL
        if suspect.any():
            addend = np.broadcast_to(np.asarray(c, dtype=np.float64), total.shape)
            odd = _round_to_odd(product[suspect], addend[suspect], total[suspect])
            result[suspect] = odd.astype(np.float32)
    return result


def _round_to_odd(product: np.ndarray, addend: np.ndarray, total: np.ndarray) -> np.ndarray:
    """The binary64 sum, moved one ulp towards the true sum where it was inexact and even."""
    part = total - product
    error = (product - (total - part)) + (addend - part)
    inexact_even = (error != 0) & ((total.view(np.int64) & 1) == 0) & np.isfinite(total)
    towards = np.where(error > 0, np.inf, -np.inf)
    return np.where(inexact_even, np.nextafter(total, towards), total)
