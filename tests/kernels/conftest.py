"""Backends under test: every instruction set of this machine, with one, two and three threads."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from twoends.kernels.native_ops import native_ops
from twoends.kernels.ops import Matrix, Ops
from twoends.kernels.reference import reference_ops

_native = pytest.importorskip("twoends.kernels._native", reason="the native kernels were not built")
OP_FIXTURES = Path(__file__).parents[2].parent / "shared" / "data" / "ops"


@pytest.fixture(scope="session", params=_native.available_isas())
def isa(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def native(isa: str) -> Ops:
    """Two threads: large calls are divided, small ones are not."""
    return native_ops(isa, 2)


@pytest.fixture(scope="session", params=[1, 2, 3], ids="{}-threads".format)
def threaded(isa: str, request: pytest.FixtureRequest) -> Ops:
    return native_ops(isa, request.param)


@pytest.fixture(scope="session")
def reference() -> Ops:
    return reference_ops()


@pytest.fixture(autouse=True)
def _infinities_are_no_surprise() -> Iterator[None]:
    """numpy warns where the inputs of these tests overflow on purpose."""
    with np.errstate(all="ignore"):
        yield


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20261130)


class Same:
    """Equality of bits: NaN equals NaN, and a zero has its sign."""

    def __call__(self, got: np.ndarray, expected: np.ndarray) -> None:
        assert got.shape == expected.shape
        assert got.dtype == expected.dtype
        if got.dtype.kind != "f":
            np.testing.assert_array_equal(got, expected)
            return
        differs = (got.view(np.int32) != expected.view(np.int32)) & ~(np.isnan(got) & np.isnan(expected))
        if differs.any():
            where = tuple(int(i[0]) for i in np.nonzero(differs))
            hexes = f"{float(got[where]).hex()} instead of {float(expected[where]).hex()}"
            raise AssertionError(f"{int(differs.sum())} of {got.size} differ, first at {where}: {hexes}")


@pytest.fixture
def same() -> Same:
    return Same()


class Make:
    """Arrays and matrices of a test; `wild` ones hold zeros of both signs, subnormals, huge values."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng

    def normal(self, *shape: int, scale: float = 1.0) -> np.ndarray:
        return (self.rng.standard_normal(shape) * scale).astype(np.float32)

    def wild(self, *shape: int, nan: bool = False) -> np.ndarray:
        x = self.normal(*shape)
        special = [0.0, -0.0, 1e-40, -1e-44, 1e-30, 3e38, -3e38] + ([np.nan, np.inf, -np.inf] if nan else [])
        pick = self.rng.integers(0, 8 * len(special), shape)
        for i, value in enumerate(special):
            x[pick == i] = value
        return x

    def matrix(self, form: str, rows: int, cols: int, *, offset: int = 0, wild: bool = False) -> Matrix:
        """`offset` is the address of the first weight byte modulo 64."""
        if form == "mxfp4":
            data = self.rng.integers(0, 256, rows * cols // 2, dtype=np.uint8)
            low, high = (0, 256) if wild else (120, 130)
            scale = self.rng.integers(low, high, rows * cols // 32).astype(np.uint8)
            return self.placed(Matrix(format="mxfp4", rows=rows, cols=cols, data=data, scale=scale), offset)
        w = self.wild(rows, cols, nan=True) if wild else self.normal(rows, cols)
        if form == "bf16":
            data = (w.view(np.uint32) >> 16).astype("<u2").reshape(-1).view(np.uint8)
            return self.placed(Matrix(format="bf16", rows=rows, cols=cols, data=data), offset)
        return self.placed(
            Matrix(format="f32", rows=rows, cols=cols, data=w.reshape(-1).view(np.uint8)), offset
        )

    def placed(self, matrix: Matrix, offset: int) -> Matrix:
        moved = {name: self._at(getattr(matrix, name), offset) for name in ("data", "scale")}
        return Matrix(format=matrix.format, rows=matrix.rows, cols=matrix.cols, **moved)

    def _at(self, data: np.ndarray | None, offset: int) -> np.ndarray | None:
        if data is None:
            return None
        room = np.empty(data.size + 128, np.uint8)
        start = (offset - room.ctypes.data) % 64
        room[start : start + data.size] = data
        part = room[start : start + data.size]
        part.flags.writeable = False
        return part


@pytest.fixture
def make(rng: np.random.Generator) -> Make:
    return Make(rng)


def product(ops: Ops, matrix: Matrix, x_TX: np.ndarray, *, room: int = 0, first_row: int = 0) -> np.ndarray:
    """out_TY of a matmul into a NaN-filled buffer with `room` more columns than the matrix has rows."""
    out_TY = np.full((x_TX.shape[0], matrix.rows + room), np.nan, np.float32)
    ops.matmul(matrix, x_TX, out_TY=out_TY, first_row=first_row)
    return out_TY


@pytest.fixture
def multiply() -> Any:
    return product


@pytest.fixture
def op_fixture() -> Any:
    """Reads a fixture of another implementation; arrays get their shapes."""

    def read(name: str) -> dict[str, Any]:
        path = OP_FIXTURES / f"{name}.json"
        if not path.exists():
            pytest.skip("the op fixtures (../shared/data/ops) are not here")
        raw = json.loads(path.read_text())
        return {
            key: np.array(value["data"]).reshape(value["shape"]) if isinstance(value, dict) else value
            for key, value in raw.items()
        }

    return read
