"""The inputs of the self-check: numbers that are the same on every machine and every numpy."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from twoends.kernels.ops import F32, Format, Matrix, Ops

# (operation, what was put in, how to run it)
Case = tuple[str, str, Callable[[Ops], list[np.ndarray]]]
# Both signs of zero and subnormals (the first four), the largest numbers.
SPECIAL = np.array([0.0, -0.0, 1e-40, -1e-44, 1.2e-38, 3e38, -3e38, 88.8, -103.5, 0.625], np.float32)


class Numbers:
    """Numbers by counter, the same everywhere: the finaliser of splitmix64 over 1, 2, 3, ..."""

    def __init__(self) -> None:
        self._drawn = 0

    def bits(self, count: int) -> np.ndarray:
        z = np.arange(self._drawn + 1, self._drawn + count + 1, dtype=np.uint64)
        self._drawn += count
        z *= np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))

    def between(self, low: float, high: float, *shape: int) -> F32:
        """24 random bits a number, so that sums must round."""
        unit = (self.bits(math.prod(shape)) >> np.uint64(40)).astype(np.float64) / 2.0**24
        return (low + (high - low) * unit).astype(np.float32).reshape(shape)

    def some(self, *shape: int) -> F32:
        return self.between(-2.0, 2.0, *shape)

    def special(self, *shape: int) -> F32:
        x = self.some(*shape).reshape(-1)
        x[: SPECIAL.size] = SPECIAL
        return x.reshape(shape)

    def matrix(self, form: Format, rows: int, cols: int) -> Matrix:
        """Weights at an odd address; all codes and the extreme scales of mxfp4."""
        if form == "f32":
            return Matrix(
                format=form, rows=rows, cols=cols, data=self.some(rows, cols).reshape(-1).view(np.uint8)
            )
        data = np.empty(rows * cols * 2 + 1 if form == "bf16" else rows * cols // 2 + 1, np.uint8)[1:]
        if form == "bf16":
            upper = (self.some(rows, cols).view(np.uint32) >> 16).astype(np.uint16)
            data[:] = upper.reshape(-1).view(np.uint8)
            return Matrix(format=form, rows=rows, cols=cols, data=data)
        data[:] = self.bits(data.size) & np.uint64(255)
        scale = (self.bits(rows * cols // 32) % np.uint64(6) + np.uint64(120)).astype(np.uint8)
        scale[:4] = (0, 1, 254, 255)
        return Matrix(format=form, rows=rows, cols=cols, data=data, scale=scale)
