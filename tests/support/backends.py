"""The backends and instruction sets that tests are parametrised over."""

from __future__ import annotations

from twoends.kernels.ops import Ops
from twoends.kernels.reference import reference_ops

try:
    from twoends.kernels import _native
except ImportError:
    _native = None


def native_isas() -> list[str]:
    """Instruction sets of the native module that this machine runs; empty without the module."""
    return [] if _native is None else list(_native.available_isas())


def native(isa: str, threads: int) -> Ops:
    """Native operations on one instruction set."""
    from twoends.kernels.native_ops import native_ops

    return native_ops(isa, threads)


def all_ops() -> list[Ops]:
    """The reference and every native instruction set that this machine runs."""
    return [reference_ops(), *(native(isa, 2) for isa in native_isas())]
