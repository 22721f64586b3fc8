"""exp, sigmoid, tanh, softplus, silu: native equals reference on millions of points, near the true values."""

from __future__ import annotations

import importlib

import numpy as np
import pytest

from twoends.kernels.reference import elementary

# Stated in docs/contracts.md, where they were measured over far more points.
ULP_BOUNDS = {"exp": 1.0, "tanh": 1.5, "sigmoid": 2.41, "softplus": 2.8}
SPECIAL = [
    0.0,
    -0.0,
    np.inf,
    -np.inf,
    np.nan,
    1e-45,
    -1e-45,
    1e-38,
    88.72,
    88.73,
    89,
    -87.4,
    -103.9,
    -104,
    0.625,
    3e38,
]


def points(count: int, seed: int) -> np.ndarray:
    """Any bit pattern, the ranges where the functions bend, both sides of every clamp."""
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 2**32, count // 4, dtype=np.uint32).view(np.float32)
    spread = (rng.random(count // 2, np.float32) - np.float32(0.5)) * 220
    near = (rng.standard_normal(count // 4) * 0.5).astype(np.float32)
    return np.concatenate([bits, spread, near, np.array(SPECIAL, np.float32)])


def true_value(name: str, x: np.ndarray) -> np.ndarray:
    x = x.astype(np.longdouble)
    if name == "exp":
        return np.exp(x)
    if name == "tanh":
        return np.tanh(x)
    if name == "sigmoid":
        return np.where(x >= 0, 1 / (1 + np.exp(-np.abs(x))), np.exp(-np.abs(x)) / (1 + np.exp(-np.abs(x))))
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


@pytest.mark.parametrize("name", [*ULP_BOUNDS, "silu"])
def test_native_equals_reference_on_a_million_points(name, isa, same):
    kernels = importlib.import_module("twoends.kernels._native").Kernels(isa, 1)
    x = points(1_000_000, seed=1)
    out = np.full_like(x, np.nan)
    getattr(kernels, name)(x, out)
    same(out, getattr(elementary, name)(x))


@pytest.mark.parametrize("name", ULP_BOUNDS)
def test_the_error_stays_within_its_bound(name):
    x = points(400_000, seed=2)
    x = x[np.isfinite(x)]
    got = getattr(elementary, name)(x).astype(np.longdouble)
    truth = true_value(name, x)
    inside = np.abs(truth) < np.finfo(np.float32).max
    ulp = np.spacing(np.maximum(np.abs(truth[inside]), np.longdouble(2.0**-126)).astype(np.float32))
    error = np.abs(got[inside] - truth[inside]) / ulp
    assert error.max() <= ULP_BOUNDS[name], f"{error.max():.3f} ulp at {x[inside][error.argmax()]!r}"


@pytest.mark.parametrize(
    ("name", "x", "expected"),
    [
        ("exp", 0.0, 1.0), ("exp", -np.inf, 0.0), ("exp", np.inf, np.inf), ("exp", -104.0, 0.0),
        ("sigmoid", 0.0, 0.5), ("sigmoid", np.inf, 1.0), ("sigmoid", -np.inf, 0.0),
        ("tanh", np.inf, 1.0), ("tanh", -np.inf, -1.0), ("tanh", -0.0, -0.0), ("tanh", 1e-44, 1e-44),
        ("softplus", -np.inf, 0.0), ("softplus", np.inf, np.inf), ("softplus", 200.0, 200.0),
    ],
)  # fmt: skip
def test_special_values(name, x, expected, same):
    same(getattr(elementary, name)(np.array([x], np.float32)), np.array([expected], np.float32))
