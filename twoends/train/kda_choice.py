"""Which code runs the gated delta rule: native tiles (CPU), flash-linear-attention (CUDA), or torch tiles."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from twoends.kernels.built import HOW_TO_GET_THE_FAST_ONES, is_built
from twoends.train.conv_native import native_convolution
from twoends.train.convolution import short_convolution
from twoends.train.delta_rule import tiled_kda
from twoends.train.kda_native import native_kda
from twoends.train.native import native_kernels
from twoends.train.packing import lengths_of_documents

Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None], Tensor]
Convolution = Callable[[Tensor, Tensor, Tensor | None], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class KdaChoice:
    """A kernel with `tiled_kda`'s arguments, its name, and one sentence on why it was taken.

    `convolve` takes `short_convolution`'s arguments.
    """

    name: str
    reason: str
    kernel: Kernel
    convolve: Convolution = short_convolution


def choose_kda(device: torch.device) -> KdaChoice:
    """The kernel for a whole run on `device`; ask once and print the reason."""
    if device.type == "cpu" and is_built():
        kernels = native_kernels()
        reason = f"the run is on the CPU and the native kernels are built ({kernels.isa})"
        return KdaChoice(name="native tiles", reason=reason, kernel=native_kda, convolve=native_convolution)
    if device.type == "cpu":
        reason = f"there was no C++ compiler at install; faster:  {HOW_TO_GET_THE_FAST_ONES}"
        return KdaChoice(name="tiles", reason=reason, kernel=tiled_kda)
    if device.type != "cuda":
        reason = f"flash-linear-attention's kernels need CUDA, this run is on {device.type}"
        return KdaChoice(name="tiles", reason=reason, kernel=tiled_kda)
    if importlib.util.find_spec("fla") is None:
        reason = "flash-linear-attention is not installed (pip install flash-linear-attention)"
        return KdaChoice(name="tiles", reason=reason, kernel=tiled_kda)
    chunk_kda = importlib.import_module("fla.ops.kda").chunk_kda
    reason = "the run is on CUDA and flash-linear-attention is installed"
    return KdaChoice(name="flash-linear-attention", reason=reason, kernel=flash_kernel(chunk_kda))


def flash_kernel(chunk_kda: Callable[..., tuple[Tensor, Tensor | None]]) -> Kernel:
    """`chunk_kda` of fla.ops.kda behind `tiled_kda`'s arguments.

    Queries are scaled and gates bounded before they get here. Documents go in as one row with cu_seqlens.
    """

    def kernel(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, documents_BT: Tensor | None = None
    ) -> Tensor:
        if documents_BT is None:
            return chunk_kda(q=q, k=k, v=v, g=g, beta=beta, scale=1.0)[0]
        lengths = lengths_of_documents(documents_BT).long()
        q, k, v, g, beta = (x.flatten(0, 1)[None] for x in (q, k, v, g, beta))
        out = chunk_kda(q=q, k=k, v=v, g=g, beta=beta, scale=1.0, cu_seqlens=lengths)[0]
        return out[0].unflatten(0, documents_BT.shape)

    return kernel
