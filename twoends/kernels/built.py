"""Whether the native kernels were built, known without loading numpy or the module itself."""

from __future__ import annotations

import importlib.util

MODULE = "twoends.kernels._native"
HOW_TO_GET_THE_FAST_ONES = "apt install g++ && pip install --force-reinstall --no-deps --no-cache-dir twoends"


def is_built() -> bool:
    """False after an install without a C++ compiler, which leaves the numpy kernels only."""
    return importlib.util.find_spec(MODULE) is not None
