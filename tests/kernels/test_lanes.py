"""fma and dot, the two things everything else is made of, against hardware and against literal loops."""

from __future__ import annotations

import importlib
import math
from fractions import Fraction

import numpy as np
import pytest

from twoends.kernels.reference.fma import fma
from twoends.kernels.reference.lanes import dot, sum_of_squares

E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


def hardware(isa: str):
    """fma of one instruction set over arrays."""
    kernels = importlib.import_module("twoends.kernels._native").Kernels(isa, 1)

    def run(a, b, c):
        out = np.full_like(a, np.nan)
        kernels.fma(a, b, c, out)
        return out

    return run


def bit_patterns(count: int, seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 2**32, count, dtype=np.uint32).view(np.float32) for _ in range(3)]


def near_ties(count: int, seed: int) -> list[np.ndarray]:
    """Products of few bits and addends of a like size: half of the sums are ties or next to one."""
    rng = np.random.default_rng(seed)
    a = rng.integers(-255, 256, count).astype(np.float32)
    b = (rng.integers(0, 2**24, count) | 1).astype(np.float32)
    c = np.ldexp(rng.integers(-(2**24), 2**24, count).astype(np.float32), rng.integers(-40, 40, count))
    return [a, b, c.astype(np.float32)]


def subnormals(count: int, seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    a, b = (np.ldexp(rng.standard_normal(count), rng.integers(-80, -60, count)) for _ in range(2))
    return [x.astype(np.float32) for x in (a, b, rng.standard_normal(count) * 2.0**-140)]


@pytest.mark.parametrize("inputs", [bit_patterns, near_ties, subnormals], ids=lambda f: f.__name__)
def test_the_emulated_fma_equals_every_instruction_set(inputs, isa, same):
    a, b, c = inputs(1_000_000, seed=3)
    same(hardware(isa)(a, b, c), fma(a, b, c))


def exact_fma(a: float, b: float, c: float) -> float:
    """round(a * b + c) to binary32 through exact fractions; finite inputs, normal results."""
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0:
        return float(np.float32(a) * np.float32(b) + np.float32(c))
    exponent = math.floor(math.log2(abs(exact))) - 25
    lowest = max(exponent, -149 - 2)
    scaled = exact / Fraction(2) ** lowest
    whole = scaled.numerator // scaled.denominator
    sticky = whole | 1 if whole * scaled.denominator != scaled.numerator else whole
    return float(np.float32(math.ldexp(sticky, lowest)))


def test_the_emulated_fma_equals_exact_arithmetic():
    a, b, c = near_ties(2000, seed=4)
    got = fma(a, b, c)
    expected = [exact_fma(*map(float, row)) for row in zip(a, b, c, strict=True)]
    np.testing.assert_array_equal(got, np.array(expected, np.float32))


def literal_dot(w: np.ndarray, x: np.ndarray) -> np.float32:
    """The contract's words as loops over single numbers."""
    size = -(-w.size // 32) * 32
    w, x = (np.pad(v, (0, size - v.size)) for v in (w, x))
    lanes = [0.0] * 16
    for group in range(0, size, 32):
        for lane in range(16):
            for element in (group + 2 * lane, group + 2 * lane + 1):
                lanes[lane] = exact_fma(float(w[element]), float(x[element]), lanes[lane])
    return literal_reduction(lanes)


def literal_reduction(lanes: list[float]) -> np.float32:
    for width in (8, 4, 2, 1):
        lanes = [float(np.float32(lanes[i]) + np.float32(lanes[i + width])) for i in range(width)]
    return np.float32(lanes[0])


@pytest.mark.parametrize("size", [1, 2, 17, 32, 33, 100])
def test_dot_is_the_walk_of_the_contract(size, make):
    w, x = make.normal(size), make.normal(size)
    assert dot(w, x) == literal_dot(w, x)


def test_mxfp4_dot_is_the_walk_of_the_contract(make, reference, multiply):
    matrix, x = make.matrix("mxfp4", 1, 96), make.normal(96)
    lanes = [0.0] * 16
    for group in range(3):
        scale = 2.0 ** (int(matrix.scale[group]) - 127)
        for lane in range(16):
            byte = int(matrix.data[16 * group + lane])
            x0, x1 = x[32 * group + 2 * lane], x[32 * group + 2 * lane + 1]
            first = float(np.float32(E2M1[byte & 15]) * x0)
            p = exact_fma(float(E2M1[byte >> 4]), float(x1), first)
            lanes[lane] = exact_fma(p, scale, lanes[lane])
    assert multiply(reference, matrix, x[None])[0, 0] == literal_reduction(lanes)


@pytest.mark.parametrize("size", [1, 31, 33, 100])
def test_the_sum_of_squares_walks_the_same_lanes_in_binary64(size, make):
    x = make.normal(size)
    padded = np.pad(x.astype(np.float64), (0, -size % 32)).reshape(-1, 16, 2)
    lanes = np.zeros(16)
    for group in padded:
        lanes = lanes + group[:, 0] ** 2
        lanes = lanes + group[:, 1] ** 2
    for width in (8, 4, 2, 1):
        lanes = lanes[:width] + lanes[width : 2 * width]
    assert sum_of_squares(x) == lanes[0]
