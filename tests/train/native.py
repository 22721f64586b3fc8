"""Tests of native kernels: one instruction set and one number of threads at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from twoends.train.native import native_kernels


@contextmanager
def on_kernels(isa: str, threads: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What runs inside runs on `isa` with `threads`, and not on what happened to be chosen."""
    before = torch.get_num_threads()
    monkeypatch.setenv("TWOENDS_ISA", isa)
    torch.set_num_threads(threads)
    try:
        assert (native_kernels().isa, native_kernels().threads) == (isa, threads)
        yield
    finally:
        torch.set_num_threads(before)
