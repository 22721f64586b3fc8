"""exp, sigmoid, tanh, softplus: short polynomials, the same operations on every machine.

exp is within 1 ulp of the true value, tanh 1.5, sigmoid 2.41, softplus 2.8 (the tests measure it);
subnormal results are kept; NaN gives NaN. The coefficients are minimax fits of
our own (tests/golden/make_polynomials.py). docs/contracts.md lists the operations.
"""

from __future__ import annotations

import numpy as np

from twoends.kernels.ops import F32
from twoends.kernels.reference.fma import fma


def _f(text: str) -> np.float32:
    return np.float32(float.fromhex(text))


LOG2_E = _f("0x1.715476p+0")
LN2_HIGH = _f("0x1.63p-1")
LN2_LOW = _f("-0x1.bd0106p-13")
# (e^r - 1 - r) / r^2 on |r| <= 0.35, constant term first
EXP_POLY = tuple(
    map(_f, ("0x1p-1", "0x1.555554p-3", "0x1.555486p-5", "0x1.11128p-7", "0x1.6d945cp-10", "0x1.9f02cap-13"))
)
# (tanh(a)/a - 1) / a^2 as a polynomial of a^2, a <= 0.625
TANH_POLY = tuple(
    map(_f, ("-0x1.555532p-2", "0x1.11071p-3", "-0x1.b837f2p-5", "0x1.520236p-6", "-0x1.752162p-8"))
)
# (atanh(s)/s - 1) / s^2 as a polynomial of s^2, s <= 1/3
ATANH_POLY = tuple(
    map(_f, ("0x1.555558p-2", "0x1.999688p-3", "0x1.250d6ep-3", "0x1.b67758p-4", "0x1.f332e2p-4"))
)
TANH_SPLIT = np.float32(0.625)
ONE = np.float32(1)
TWO = np.float32(2)


def _horner(coefficients: tuple[np.float32, ...], x: F32) -> F32:
    """c0 + x (c1 + x (c2 + ...)), one fma a step, from the highest coefficient down."""
    total = np.full_like(x, coefficients[-1])
    for c in reversed(coefficients[:-1]):
        total = fma(total, x, c)
    return total


def exp(x: F32) -> F32:
    """e^x. Overflows to inf above 88.72, underflows through subnormals to 0 below -103.97."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        x = np.where(x > 89, np.float32(89), x)
        x = np.where(x < -104, np.float32(-104), x)
        n = np.rint(x * LOG2_E)
        r = fma(-n, LN2_HIGH, x)
        r = fma(-n, LN2_LOW, r)
        y = ONE + fma(_horner(EXP_POLY, r), r * r, r)
        exponent = np.where(np.isnan(n), 0, n).astype(np.int32)
        half = exponent >> 1
        return np.asarray((y * _power_of_two(half)) * _power_of_two(exponent - half), dtype=np.float32)


def _power_of_two(n: np.ndarray) -> F32:
    """2^n for -126 <= n <= 127, by its bits."""
    return ((n + 127).astype(np.uint32) << 23).view(np.float32)


def sigmoid(x: F32) -> F32:
    """1 / (1 + e^-x), through e^-|x| so that neither side overflows."""
    with np.errstate(under="ignore", invalid="ignore"):
        e = exp(-np.abs(x))
        return np.asarray(np.where(x >= 0, ONE, e) / (ONE + e), dtype=np.float32)


def tanh(x: F32) -> F32:
    """An odd polynomial below 0.625, 1 - 2 / (e^2|x| + 1) above; keeps the sign of zero."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        a = np.abs(x)
        z = a * a
        small = fma(a * z, _horner(TANH_POLY, z), a)
        large = ONE - TWO / (exp(a + a) + ONE)
        return np.copysign(np.where(a < TANH_SPLIT, small, large), x)


def softplus(x: F32) -> F32:
    """log(1 + e^x) = max(x, 0) + log1p(e^-|x|), with log1p(e) = 2 atanh(e / (2 + e))."""
    with np.errstate(under="ignore", invalid="ignore"):
        e = exp(-np.abs(x))
        s = e / (TWO + e)
        z = s * s
        twice = s + s
        log1p = fma(twice * z, _horner(ATANH_POLY, z), twice)
        return np.asarray(np.where(x > 0, x, np.where(x <= 0, np.float32(0), x)) + log1p, dtype=np.float32)


def silu(x: F32) -> F32:
    """x * sigmoid(x)."""
    return x * sigmoid(x)
