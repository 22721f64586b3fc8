"""Rounding to MXFP8: E4M3 values that share a power of two in blocks of 32 (OCP MX 1.0; scales round up)."""

from __future__ import annotations

import numpy as np

from twoends.kernels.ops import F32

BLOCK = 32
# 448, the largest E4M3 value, is 0.875 * 2^9.
_TOP_FRACTION, _TOP_EXPONENT = np.float32(0.875), 9
_LEAST_EXPONENT = -127
_LEAST_NORMAL = np.float32(2.0**-6)
# Adding and taking away 2^14 rounds to multiples of 2^-9, the step below the least normal.
_TO_LEAST_STEP = np.float32(2.0**14)


def mxfp8(x: F32) -> F32:
    """x with every block of 32 of the last axis rounded to nearest even; a block not finite becomes NaN.

    The scale is 2^ceil(log2(largest / 448)), at least 2^-127: nothing saturates.
    """
    assert x.shape[-1] % BLOCK == 0, "blocks are whole"
    blocks = x.reshape(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK)
    largest = np.abs(blocks).max(axis=-1, keepdims=True)
    fraction, exponent = np.frexp(largest)
    exponent = exponent - _TOP_EXPONENT + (fraction > _TOP_FRACTION)
    # A largest of zero has exponent 0, and any scale would do.
    exponent = np.where(largest == 0, _LEAST_EXPONENT, np.maximum(exponent, _LEAST_EXPONENT)).astype(np.int32)
    with np.errstate(all="ignore"):
        scaled = np.abs(blocks) * np.ldexp(np.float32(1), -exponent)
        rounded = _e4m3(scaled) * np.ldexp(np.float32(1), exponent)
    out = np.copysign(rounded, blocks)
    out = np.where(np.isfinite(largest), out, np.float32(np.nan))
    return np.ascontiguousarray(out.reshape(x.shape), dtype=np.float32)


def _e4m3(positive: F32) -> F32:
    """Nearest multiples of the E4M3 step, ties to even; at most 448 comes in."""
    bits = positive.view(np.uint32)
    kept = (bits + np.uint32(0x7FFFF) + ((bits >> 20) & 1)) & np.uint32(0xFFF00000)
    small = (positive + _TO_LEAST_STEP) - _TO_LEAST_STEP
    return np.where(positive < _LEAST_NORMAL, small, kept.view(np.float32))
