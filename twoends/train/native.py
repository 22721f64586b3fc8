"""The native kernels as training calls them: one pool for each number of threads, tensors as arrays."""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
from torch import Tensor

from twoends.kernels.choose import instruction_set, load_module


@functools.cache
def _pool(isa: str | None, threads: int) -> Any:
    native = load_module()
    return native.Kernels(instruction_set(native, isa)[0], threads)


def native_kernels() -> Any:
    """The native kernels on torch's number of threads, made once for each; TWOENDS_ISA names the set."""
    return _pool(os.environ.get("TWOENDS_ISA"), torch.get_num_threads())


def arrays(*tensors: Tensor | None) -> list[Any]:
    """Each tensor as the native module takes it, in C order; None stays None."""
    return [None if tensor is None else tensor.contiguous().numpy() for tensor in tensors]


def empty_like(tensor: Tensor) -> Tensor:
    """Room in C order for what is to be written, whatever the strides of `tensor`."""
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)
