"""MXFP4, the 4-bit block format of K3's routed experts. This page is its specification.

A matrix [rows, cols], cols a multiple of 32, is stored as two uint8 arrays:

    packed [rows, cols / 2]    byte j of a row holds column 2j in its low four bits, 2j + 1 in its high four
    scale  [rows, cols / 32]   byte g of a row scales columns 32g .. 32g + 31

A four-bit code is E2M1: bit 3 is the sign, bits 0..2 choose 0, 0.5, 1, 1.5, 2, 3, 4, 6. Code 8 is
minus zero and stays minus zero. A scale byte s is E8M0: the multiplier 2^(s - 127). Byte 0 is
2^-127, a subnormal of binary32 that must not be flushed; byte 255 is NaN, and so is its whole
group. There is no global scale and no zero point. weight = value * multiplier.

Every weight is exact in binary32 while s <= 252. At s = 253 the values 4 and 6, at s = 254 the
values 2 to 6, exceed binary32 and decode to infinity; no released byte is near there.

Encoding follows the rule that the released bytes show (RCEIL): with a = the largest magnitude of
the group, the multiplier is 2^ceil(log2(a / 6)), the smallest power of two under which no value
saturates; values round to the nearest of the eight, ties to the even code; the sign is copied.
A group of zeros gets scale byte 127. Re-encoding decoded weights keeps every value but not every
byte: a group whose largest code is 3 (or less) could have been stored with a smaller multiplier.
Where bytes matter, use `recode` with the original scales.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from twoends.errors import NotSound

F32 = NDArray[np.float32]
Bytes = NDArray[np.uint8]

GROUP = 32
ZERO_GROUP_SCALE = 127
_SCALE_BIAS = 127
# 3.5 * 2^126: from here values round to the code for 4 under scale byte 253.
_ROUNDS_TO_INFINITY = 1.75 * 2.0**127
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def decode(packed: Bytes, scale: Bytes) -> F32:
    """The weights [rows, cols] of `packed` [rows, cols / 2] and `scale` [rows, cols / 32], exactly."""
    rows, cols = _check_shapes(packed, scale)
    values = np.array([*_E2M1, *(-value for value in _E2M1)], dtype=np.float32)
    byte = np.arange(256)
    pairs = np.stack([values[byte & 15], values[byte >> 4]], axis=1)
    weights = pairs[packed].reshape(rows, cols // GROUP, GROUP)
    with np.errstate(over="ignore"):
        weights *= _multipliers(scale)[:, :, None]
    return weights.reshape(rows, cols)


def encode(weights: F32) -> tuple[Bytes, Bytes]:
    """(packed, scale) of finite binary32 `weights` [rows, cols] by the RCEIL rule.

    Where the rule asks for less than 2^-127 the scale stays at byte 0 and values round to its grid.
    Raises NotSound if a value is not finite, or would round up to 2^128, which binary32 lacks.
    """
    groups = _groups(weights)
    amax = np.abs(groups).max(axis=2)
    refused = ~(amax < _ROUNDS_TO_INFINITY)
    if refused.any():
        row, group = np.argwhere(refused)[0]
        what = "too large" if np.isfinite(amax[row, group]) else "not finite"
        raise NotSound(
            f"Row {row} has a value that is {what}, so it has no MXFP4 form.",
            evidence=[("columns", f"{group * GROUP} to {group * GROUP + GROUP - 1}")],
        )
    # a = m * 2^x with m in [0.5, 1); 6 * 2^e >= a exactly when e >= x - 3, or x - 2 if m > 0.75.
    mantissa, exponent = np.frexp(amax)
    wanted = exponent - 3 + (mantissa > 0.75) + _SCALE_BIAS
    scale: Bytes = np.where(amax == 0, ZERO_GROUP_SCALE, np.maximum(wanted, 0)).astype(np.uint8)
    return _round_to_codes(groups, scale), scale


def recode(weights: F32, scale: Bytes) -> Bytes:
    """The packed bytes of `weights` under given scales: the inverse of `decode`, byte for byte.

    Raises NotSound if a weight is not finite or not one of the sixteen values of its group: nothing
    is rounded here.
    """
    packed = _round_to_codes(_groups(weights), scale)
    back = decode(packed, scale)
    same = (back.view(np.uint32) == np.ascontiguousarray(weights).view(np.uint32)) & np.isfinite(back)
    if not same.all():
        row, column = np.argwhere(~same)[0]
        raise NotSound(
            f"The weight in row {row}, column {column} is not a value of its MXFP4 group.",
            evidence=[
                ("weight", float(weights[row, column]).hex()),
                ("scale byte", str(int(scale[row, column // GROUP]))),
                ("nearest value", float(back[row, column]).hex()),
            ],
        )
    return packed


def _round_to_codes(groups: F32, scale: Bytes) -> Bytes:
    """Packed bytes of `groups` [rows, groups, 32] rounded to the grid of `scale`."""
    rows = groups.shape[0]
    if scale.shape != groups.shape[:2] or scale.dtype != np.uint8:
        raise ValueError(f"scale must be uint8 {groups.shape[:2]}, not {scale.dtype} {scale.shape}")
    # Exact where it matters: only magnitudes far below 1/4 of the multiplier can lose bits.
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        ratio = np.abs(groups) / _multipliers(scale)[:, :, None]
        codes: Bytes = np.zeros(groups.shape, dtype=np.uint8)
        # Halfway points go to the even code: up to 2, 4, 6 at 0.75, 1.75, 3.5, otherwise down.
        for halfway, goes_up in ((0.25, 0), (0.75, 1), (1.25, 0), (1.75, 1), (2.5, 0), (3.5, 1), (5.0, 0)):
            codes += (ratio >= halfway) if goes_up else (ratio > halfway)
    codes |= np.left_shift(np.signbit(groups), 3, dtype=np.uint8)
    flat = codes.reshape(rows, -1)
    return flat[:, 0::2] | np.left_shift(flat[:, 1::2], 4, dtype=np.uint8)


def _multipliers(scale: Bytes) -> F32:
    """2^(s - 127) in binary32; NaN for 255."""
    exponents = scale.astype(np.int32) - _SCALE_BIAS
    powers = np.ldexp(np.ones(scale.shape, dtype=np.float32), np.minimum(exponents, 127))
    return np.where(scale == 255, np.float32(np.nan), powers)


def _groups(weights: F32) -> F32:
    if weights.ndim != 2 or weights.dtype != np.float32 or weights.shape[1] % GROUP:
        raise ValueError(
            f"weights must be float32 [rows, a multiple of {GROUP}], not {weights.dtype} {weights.shape}"
        )
    rows, cols = weights.shape
    return weights.reshape(rows, cols // GROUP, GROUP)


def _check_shapes(packed: Bytes, scale: Bytes) -> tuple[int, int]:
    if packed.dtype != np.uint8 or scale.dtype != np.uint8 or packed.ndim != 2 or scale.ndim != 2:
        raise ValueError("packed and scale must be two-dimensional uint8")
    rows, cols = packed.shape[0], packed.shape[1] * 2
    if cols % GROUP or scale.shape != (rows, cols // GROUP):
        raise ValueError(f"packed {packed.shape} needs scale {(rows, cols // GROUP)}, not {scale.shape}")
    return rows, cols
