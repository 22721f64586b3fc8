"""The short convolution and its SiLU by the native kernels, on the CPU: a walk over the tokens in each pass.

Neither threads nor instruction set change a bit. Letters: B batch, T tokens, P channels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from twoends.train.convolution import short_convolution
from twoends.train.native import arrays, empty_like, native_kernels

_TAPS = 4


@torch.library.custom_op("twoends::short_conv", mutates_args=(), device_types="cpu")
def _convolve(x: Tensor, filters: Tensor, documents: Tensor | None) -> Tensor:
    out = empty_like(x)
    native_kernels().conv_train(*arrays(x, filters, documents, out))
    return out


@_convolve.register_fake
def _(x: Tensor, filters: Tensor, documents: Tensor | None) -> Tensor:
    return empty_like(x)


@torch.library.custom_op("twoends::short_conv_back", mutates_args=(), device_types="cpu")
def _convolve_back(
    d_out: Tensor, x: Tensor, filters: Tensor, documents: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Gradient of x, and that of the filters by row [B,taps,P]."""
    d_x, d_filters = empty_like(x), x.new_empty(x.shape[0], _TAPS, x.shape[2])
    native_kernels().conv_train_back(*arrays(x, filters, documents, d_out, d_x, d_filters))
    return d_x, d_filters


@_convolve_back.register_fake
def _(d_out: Tensor, x: Tensor, filters: Tensor, documents: Tensor | None) -> tuple[Tensor, Tensor]:
    return empty_like(x), x.new_empty(x.shape[0], _TAPS, x.shape[2])


def _keep_for_backward(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _back(ctx: Any, d_out: Tensor) -> tuple[Tensor, Tensor, None]:
    d_x, d_filters = _convolve_back(d_out, *ctx.saved_tensors)
    return d_x, d_filters.sum(0).mT, None


_convolve.register_autograd(_back, setup_context=_keep_for_backward)


def native_convolution(x: Tensor, weight: Tensor, documents_BT: Tensor | None = None) -> Tensor:
    """`short_convolution` with the same arguments; with other than four taps in binary32 it is that one."""
    if x.dtype != torch.float32 or weight.shape[-1] != _TAPS:
        return short_convolution(x, weight, documents_BT)
    return _convolve(x, weight[:, 0], documents_BT)
