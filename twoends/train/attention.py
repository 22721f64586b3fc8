"""Causal attention within documents: by blocks on the CPU, by torch's fused kernels on CUDA.

Letters: B batch, H heads, N = B H, T tokens, K width of queries and keys, V of values; Q queries and C keys
of a block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# Queries of a block going forward, keys of a block going back.
ROWS = 128
# Blocks that a compiler may write out one by one; those of longer rows would take minutes.
UNROLLED = 8
# Queries that the mask of a fused kernel covers at a time.
MASK_ROWS = 512


def attend(
    q: Tensor, k: Tensor, v: Tensor, documents_BT: Tensor | None, *, scale: float, watch: bool
) -> tuple[Tensor, Tensor | None]:
    """Attention [B,H,T,V] of q, k [B,H,T,K] and v [B,H,T,V]; with `watch` the largest logit of each head [H].

    A token sees itself and those before it, with `documents_BT` only those of equal number. Logits are
    binary32 at least on the CPU, also of bfloat16 operands.
    """
    if q.device.type == "cuda":
        largest_H = largest_logits(q.detach(), k.detach(), documents_BT, scale=scale) if watch else None
        return fused_attention(q, k, v, documents_BT, scale=scale), largest_H
    blocks: Callable[..., tuple[Tensor, Tensor]] = _BlockAttention.apply
    if q.shape[2] > UNROLLED * ROWS:
        blocks = torch.compiler.disable(blocks)
    out_BTHV, largest_H = blocks(q, k, v, documents_BT, scale)
    return out_BTHV.transpose(1, 2), largest_H if watch else None


class _BlockAttention(torch.autograd.Function):
    """Keeps q, k, v, the output and the log of each softmax's denominator; T x T lives a block at a time.

    Going forward a block is some queries and all keys up to them; going back it is some keys and all queries
    from them on, whose logits [C,Q] are products of their own. Were they the forward pass's, a compiler would
    find that out and keep those.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, documents_BT: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        batch = q.shape[0]
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        scaled_q, wide_k = _wide(q) * scale, _wide(k)
        outs, denominators, tops = [], [], []
        for start, stop in _blocks(q.shape[1]):
            hidden = _hidden(documents_BT, (start, stop), (0, stop), device=q.device)
            logits_NQC = torch.bmm(scaled_q[:, start:stop], wide_k[:, :stop].mT)
            logits_NQC = _masked(logits_NQC, hidden, float("-inf"))
            top_NQ1 = logits_NQC.amax(-1, keepdim=True)
            weights_NQC = torch.exp(logits_NQC - top_NQ1)
            total_NQ1 = weights_NQC.sum(-1, keepdim=True)
            outs.append((torch.bmm(weights_NQC.to(v.dtype), v[:, :stop]) / total_NQ1).to(v.dtype))
            denominators.append(top_NQ1 + total_NQ1.log())
            tops.append(top_NQ1.amax((1, 2)))
        out_BTHV = torch.cat(outs, 1).unflatten(0, (batch, -1)).transpose(1, 2).contiguous()
        largest_H = torch.stack(tops).amax(0).unflatten(0, (batch, -1)).amax(0)
        ctx.save_for_backward(q, k, v, documents_BT, out_BTHV, torch.cat(denominators, 1))
        ctx.scale = scale
        ctx.mark_non_differentiable(largest_H)
        return out_BTHV, largest_H

    @staticmethod
    def backward(ctx: Any, grad_BTHV: Tensor, _: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, documents_BT, out_BTHV, denominator_NT1 = ctx.saved_tensors
        batch, tokens = out_BTHV.shape[:2]
        # What the softmax takes off each gradient of a weight: their mean under the weights.
        mean_BTH = (_wide(out_BTHV) * _wide(grad_BTHV)).sum(-1)
        mean_N1T = mean_BTH.transpose(1, 2).flatten(0, 1)[:, None]
        grad = grad_BTHV.transpose(1, 2).flatten(0, 1)
        wide_q, scaled_k, wide_v, wide_grad = _wide(q), _wide(k) * ctx.scale, _wide(v), _wide(grad)
        dq, dk, dv = torch.zeros_like(wide_q), [], []
        for start, stop in _blocks(tokens):
            hidden = _hidden(documents_BT, (start, tokens), (start, stop), device=q.device).mT
            logits_NCQ = torch.bmm(scaled_k[:, start:stop], wide_q[:, start:].mT)
            # Hidden pairs are masked last: nothing of a logit that overflowed may come through.
            weights_NCQ = _masked(torch.exp(logits_NCQ - denominator_NT1.mT[..., start:]), hidden, 0.0)
            pull_NCQ = torch.bmm(wide_v[:, start:stop], wide_grad[:, start:].mT) - mean_N1T[..., start:]
            pull_NCQ = _masked(weights_NCQ * pull_NCQ, hidden, 0.0).to(q.dtype)
            dv.append(torch.bmm(weights_NCQ.to(v.dtype), grad[:, start:]))
            dk.append(torch.bmm(pull_NCQ, q[:, start:]))
            dq[:, start:] += torch.bmm(pull_NCQ.mT, k[:, start:stop])
        found = (dq * ctx.scale, _wide(torch.cat(dk, 1)) * ctx.scale, torch.cat(dv, 1))
        dq, dk, dv = (x.to(q.dtype).unflatten(0, (batch, -1)) for x in found)
        return dq, dk, dv, None, None


def _blocks(tokens: int) -> list[tuple[int, int]]:
    return [(start, min(start + ROWS, tokens)) for start in range(0, tokens, ROWS)]


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _masked(x: Tensor, hidden: Tensor, value: float) -> Tensor:
    """x [N,Q,C] with `value` where `hidden` [1 or B,1,Q,C] is true."""
    return x.unflatten(0, (hidden.shape[0], -1)).masked_fill(hidden, value).flatten(0, 1)


def _hidden(
    documents_BT: Tensor | None, queries: tuple[int, int], keys: tuple[int, int], *, device: torch.device
) -> Tensor:
    """Which keys of a range each query of a range may not see [1 or B,1,Q,C]."""
    # A vector holds as many int32 as binary32; with int64 the mask takes longer than the softmax.
    query, key = (torch.arange(*x, dtype=torch.int32, device=device) for x in (queries, keys))
    hidden = (key > query[:, None])[None, None]
    if documents_BT is None:
        return hidden
    numbers_BT = documents_BT.int()
    return hidden | (numbers_BT[:, slice(*queries), None] != numbers_BT[:, None, slice(*keys)])[:, None]


def fused_attention(q: Tensor, k: Tensor, v: Tensor, documents_BT: Tensor | None, *, scale: float) -> Tensor:
    """`attend` by torch's fused kernels; no mask has more than MASK_ROWS rows."""
    value = v.shape[-1]
    # The fused kernels want queries, keys and values of one width; zeros don't change a logit.
    width = max(q.shape[-1], value)
    q, k, v = (F.pad(x, (0, width - x.shape[-1])) for x in (q, k, v))
    if documents_BT is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)[..., :value]
    pieces = []
    for start in range(0, q.shape[2], MASK_ROWS):
        stop = min(start + MASK_ROWS, q.shape[2])
        seen = ~_hidden(documents_BT, (start, stop), (0, stop), device=q.device)
        pieces.append(
            F.scaled_dot_product_attention(
                q[:, :, start:stop], k[:, :, :stop], v[:, :, :stop], attn_mask=seen, scale=scale
            )
        )
    return torch.cat(pieces, 2)[..., :value]


def largest_logits(q: Tensor, k: Tensor, documents_BT: Tensor | None, *, scale: float) -> Tensor:
    """Largest logit of each head over what attention sees, binary32 [H]. The fused kernels don't tell it."""
    found = []
    for start in range(0, q.shape[2], MASK_ROWS):
        stop = min(start + MASK_ROWS, q.shape[2])
        hidden = _hidden(documents_BT, (start, stop), (0, stop), device=q.device)
        logits = q[:, :, start:stop] @ k[:, :, :stop].mT
        found.append(logits.masked_fill(hidden, float("-inf")).amax((0, 2, 3)))
    return torch.stack(found).amax(0).float() * scale
