"""The head's cross-entropy in pieces of rows: logits [N,W] are never there at once and never made twice.

A piece makes its logits, their softmax and both gradients in the forward pass; the way back only multiplies
them by the incoming gradient. Products run in the matmul type, softmax and loss in binary32 at least. Pieces
come in the order of rows, and the weight's gradient is summed over them in its own type.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Logits of a piece in binary32: what a core's caches hold, or enough work for a device that has its own.
_PIECE_BYTES, _DEVICE_PIECE_BYTES = 8 << 20, 512 << 20
# Each piece reads and writes the whole weight's gradient; over fewer rows that costs more than the products.
_LEAST_ROWS = 256
# Of a piece in binary32 at the same time, if nothing is fused: logits, differences, powers, slopes.
_PIECE_COPIES = 4


def piece_rows(vocab: int, device: torch.device) -> int:
    """Rows whose logits are made at a time."""
    piece_bytes = _PIECE_BYTES if device.type == "cpu" else _DEVICE_PIECE_BYTES
    return max(_LEAST_ROWS, piece_bytes // (4 * vocab))


def head_bytes(*, tokens: int, vocab: int, width: int, device: torch.device) -> int:
    """The most that the loss of `tokens` rows holds beside its inputs, all in binary32."""
    pieces = _PIECE_COPIES * min(tokens, piece_rows(vocab, device)) * vocab
    # The weight's gradient, a piece's share of it or the weight in the matmul type; the rows' gradient.
    return 4 * (pieces + 2 * vocab * width + tokens * width)


class PieceSoftmax(nn.Module):
    """What a piece's logits say of its targets; apart from the rest so that it can be compiled."""

    def forward(
        self, logits_PW: Tensor, targets_P: Tensor, counted_P: Tensor, with_softmax: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Nats of each counted target [P], and its softmax [P,W] in the logits' type; 0 where none counts."""
        z = logits_PW.to(torch.promote_types(logits_PW.dtype, torch.float32))
        top = z.amax(-1, keepdim=True)
        powers = (z - top).exp()
        total = powers.sum(-1, keepdim=True)
        nats = (total.log() + (top - z.gather(-1, targets_P[:, None])))[:, 0]
        nats = torch.where(counted_P, nats, 0.0)
        if not with_softmax:
            return nats, None
        return nats, (powers * (counted_P[:, None] / total)).to(logits_PW.dtype)


class _Sums(NamedTuple):
    nats: Tensor
    hidden_grad: Tensor | None
    weight_grad: Tensor | None


def _in_pieces(
    softmax: PieceSoftmax,
    hidden_ND: Tensor,
    weight_WD: Tensor,
    targets_N: Tensor,
    *,
    ignore: int,
    dtype: torch.dtype,
    wanted: tuple[bool, bool],
) -> _Sums:
    """The loss, and those of the gradients of hidden states and weight that are wanted."""
    counted_N = targets_N != ignore
    targets_N = torch.where(counted_N, targets_N, 0)
    weight = weight_WD.to(dtype)
    hidden_grad = torch.empty_like(hidden_ND) if wanted[0] else None
    weight_grad = torch.zeros_like(weight_WD) if wanted[1] else None
    nats = []
    step = piece_rows(len(weight), hidden_ND.device)
    for start in range(0, len(targets_N), step):
        piece = slice(start, start + step)
        x, targets, counted = hidden_ND[piece].to(dtype), targets_N[piece], counted_N[piece]
        nats_P, slope = softmax(F.linear(x, weight), targets, counted, any(wanted))
        nats.append(nats_P)
        if slope is None:
            continue
        # Of the target itself, softmax - 1: without the cancellation of a difference.
        slope.scatter_(1, targets[:, None], torch.expm1(-nats_P)[:, None].to(dtype))
        if hidden_grad is not None:
            hidden_grad[piece] = slope @ weight
        if weight_grad is not None and weight_grad.dtype == dtype:
            weight_grad.addmm_(slope.mT, x)
        elif weight_grad is not None:
            weight_grad += slope.mT @ x
    return _Sums(torch.cat(nats).sum(), hidden_grad, weight_grad)


class _HeadLoss(torch.autograd.Function):
    """`_in_pieces` as autograd sees it. It goes back once: gradients are scaled where they lie."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        softmax: PieceSoftmax,
        hidden_ND: Tensor,
        weight_WD: Tensor,
        targets_N: Tensor,
        ignore: int,
        dtype: torch.dtype,
    ) -> Tensor:
        wanted: tuple[bool, bool] = ctx.needs_input_grad[1:3]  # type: ignore[attr-defined]
        sums = _in_pieces(softmax, hidden_ND, weight_WD, targets_N, ignore=ignore, dtype=dtype, wanted=wanted)
        ctx.grads = (sums.hidden_grad, sums.weight_grad)  # type: ignore[attr-defined]
        return sums.nats

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: torch.autograd.function.FunctionCtx, *grads: Tensor
    ) -> tuple[None, Tensor | None, Tensor | None, None, None, None]:
        hidden_grad, weight_grad = ctx.grads  # type: ignore[attr-defined]
        if hidden_grad is None and weight_grad is None:
            raise RuntimeError("the head's loss goes back only once")
        ctx.grads = (None, None)  # type: ignore[attr-defined]
        for made in (hidden_grad, weight_grad):
            if made is not None:
                made.mul_(grads[0])
        return None, hidden_grad, weight_grad, None, None, None


class HeadLoss(nn.Module):
    """Sum over the counted targets of -log softmax(weight x)[target], in nats."""

    def __init__(self) -> None:
        super().__init__()
        self.softmax = PieceSoftmax()

    def forward(
        self,
        hidden_BTD: Tensor,
        weight_WD: Tensor,
        targets_BT: Tensor,
        *,
        ignore: int,
        matmul_dtype: torch.dtype | None,
    ) -> Tensor:
        """`targets_BT` equal to `ignore` don't count; `matmul_dtype` None is the weight's own type."""
        hidden_ND, targets_N = hidden_BTD.flatten(0, -2), targets_BT.flatten()
        dtype = matmul_dtype or weight_WD.dtype
        if torch.is_grad_enabled():
            return _HeadLoss.apply(self.softmax, hidden_ND, weight_WD, targets_N, ignore, dtype)
        none = (False, False)
        return _in_pieces(
            self.softmax, hidden_ND, weight_WD, targets_N, ignore=ignore, dtype=dtype, wanted=none
        ).nats
