"""The gated delta rule by the native tiles: what delta_rule.py computes, in one call a pass, on the CPU.

Nothing of a tile is kept: the backward pass makes it again from the state before it. Of a sequence of more
than 1,024 tokens the state of every 1,024 is kept. Neither threads nor instruction set change a bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from twoends.train.delta_rule import SEGMENT_TILES, TILE, tiled_kda
from twoends.train.native import arrays, empty_like, native_kernels


def _room_for_states(q: Tensor, v: Tensor, *, keep: bool) -> Tensor:
    batch, tokens, heads, keys = q.shape
    segments = (tokens - 1) // (SEGMENT_TILES * TILE) if keep else 0
    return q.new_empty(batch * heads, segments, keys, v.shape[-1])


@torch.library.custom_op("twoends::kda_tiles", mutates_args=(), device_types="cpu")
def _tiles(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, documents: Tensor | None, keep: bool
) -> tuple[Tensor, Tensor]:
    """Outputs [B,T,H,V] and the states kept [B*H, segments - 1, K, V], none unless `keep`."""
    out, states = empty_like(v), _room_for_states(q, v, keep=keep)
    inputs = arrays(q, k, v, g, beta, documents)
    native_kernels().kda_tiles(*inputs, SEGMENT_TILES, states.numpy() if keep else None, out.numpy())
    return out, states


@_tiles.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, documents: Tensor | None, keep: bool
) -> tuple[Tensor, Tensor]:
    return empty_like(v), _room_for_states(q, v, keep=keep)


@torch.library.custom_op("twoends::kda_tiles_back", mutates_args=(), device_types="cpu")
def _tiles_back(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    documents: Tensor | None,
    states: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, g and beta."""
    gradients = tuple(map(empty_like, (q, k, v, g, beta)))
    inputs = arrays(q, k, v, g, beta, documents)
    native_kernels().kda_tiles_back(*inputs, SEGMENT_TILES, *arrays(states, d_out, *gradients))
    return gradients  # type: ignore[return-value]


@_tiles_back.register_fake
def _(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    documents: Tensor | None,
    states: Tensor,
) -> tuple[Tensor, ...]:
    return tuple(map(empty_like, (q, k, v, g, beta)))


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, g, beta, documents, keep = inputs
    if not keep:
        raise RuntimeError("gradients need the states that only keep=True keeps")
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, k, v, g, beta, documents, output[1])


def _back(ctx: Any, d_out: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    return (*_tiles_back(d_out, *ctx.saved_tensors), None, None)


_tiles.register_autograd(_back, setup_context=_keep_for_backward)


def native_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, documents_BT: Tensor | None = None
) -> Tensor:
    """`tiled_kda` with the same arguments and shapes; in any type but binary32 it is `tiled_kda`."""
    if q.dtype != torch.float32:
        return tiled_kda(q, k, v, g, beta, documents_BT)
    return _tiles(q, k, v, g, beta, documents_BT, torch.is_grad_enabled())[0]
