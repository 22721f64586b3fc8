"""The backends and instruction sets that tests are parametrised over."""

from __future__ import annotations

from twoends.kernels.reference import reference_ops


def all_ops():
    """The reference and every native instruction set that this machine runs."""
    return [reference_ops()]
