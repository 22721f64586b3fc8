"""The gated delta rule of KDA: the recurrence that defines it, and the tile form that trains.

Letters: B batch, T tokens, H heads, K key channels, V value channels, N tiles, M = B H, C tokens of a tile.

Documents of a packed row are told apart inside the tiles, whose borders stay where they are (row 0 of the
sequence): a token neither couples to another document nor reads its state, and decays are counted from the
start of the tile or of the document, whichever comes later.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

# A gate of at least -5 per token keeps exp(-sum) over 16 tokens below exp(80) = 5.5e34, inside binary32;
# 32 tokens would overflow.
TILE = 16
# Tiles between states that a training pass keeps; what lies between is computed again going back.
SEGMENT_TILES = 64


def recurrent_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, documents_BT: Tensor | None = None
) -> Tensor:
    """The definition, token by token. q (scaled), k, g [B,T,H,K], v [B,T,H,V], beta [B,T,H] -> [B,T,H,V].

    Decay the state, correct what it predicts for k towards v, then read it with q. The state is zero where a
    row or a document begins.
    """
    state_BHKV = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    outputs = []
    for t in range(q.shape[1]):
        if documents_BT is not None and t:
            goes_on_B = documents_BT[:, t] == documents_BT[:, t - 1]
            state_BHKV = torch.where(goes_on_B[:, None, None, None], state_BHKV, 0.0)
        state_BHKV = state_BHKV * g[:, t].exp()[..., None]
        error = v[:, t] - torch.einsum("bhkv,bhk->bhv", state_BHKV, k[:, t])
        state_BHKV = state_BHKV + k[:, t][..., None] * (beta[:, t][..., None] * error)[..., None, :]
        outputs.append(torch.einsum("bhkv,bhk->bhv", state_BHKV, q[:, t]))
    return torch.stack(outputs, 1)


class _UnitLowerInverse(torch.autograd.Function):
    """(I + L)^-1 for strictly lower L [..., 16, 16], by block substitution.

    Doubling the block size replaces T by T - T L' T, where L' holds the blocks that join two neighbours.
    Exact algebra at each level, and stable where a power series of L is not.
    """

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, lower: Tensor) -> Tensor:
        size = lower.shape[-1]
        row = torch.arange(size, device=lower.device)
        inverse = torch.eye(size, dtype=lower.dtype, device=lower.device).expand_as(lower)
        block = 1
        while block < size:
            pair = row // (2 * block)
            joins = (pair[:, None] == pair) & (row[:, None] // block % 2 == 1) & (row // block % 2 == 0)
            step = lower * joins
            inverse = inverse - (step if block == 1 else inverse @ step @ inverse)
            block *= 2
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return -(inverse.mT @ grads[0] @ inverse.mT)


class _Decay(torch.autograd.Function):
    """exp of the sum of gates since the anchor and its inverse, [...,C,K]; `opens` [...,C] marks new anchors.

    The inverse is made here because its derivative, -1 / decay^2, doesn't fit into binary32. A running
    product, not the exponential of a running sum: a sum near -80 is rounded to 4e-6, and that would be the
    relative error of every decay between two tokens that far from the anchor.
    """

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, gates: Tensor, opens: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        step = gates.exp()
        rows = [step[..., 0, :]]
        for i in range(1, gates.shape[-2]):
            before = rows[-1]
            if opens is not None:
                before = torch.where(opens[..., i, None], 1.0, before)
            rows.append(step[..., i, :] * before)
        decay = torch.stack(rows, -2)
        rise = 1 / decay
        ctx.save_for_backward(decay, rise, *([] if opens is None else [opens]))
        return decay, rise

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[Tensor, None]:
        decay, rise, *rest = ctx.saved_tensors  # type: ignore[attr-defined]
        pull = grads[0] * decay - grads[1] * rise
        rows = [pull[..., -1, :]]
        for i in range(pull.shape[-2] - 2, -1, -1):
            behind = rows[-1]
            if rest:
                behind = torch.where(rest[0][..., i + 1, None], 0.0, behind)
            rows.append(pull[..., i, :] + behind)
        return torch.stack(rows[::-1], -2), None


class _Borders(NamedTuple):
    """What documents allow in a run of tiles; every field bool."""

    opens: Tensor  # [N,M,C] this token begins a document
    joined: Tensor  # [N,M,C,C] both tokens are of one document
    enters: Tensor  # [N,M,C,1] this token's document was going on when the tile began
    leaves: Tensor  # [N,M,C,1] this token's document still goes on when the tile ends


def _to_tiles(x: Tensor) -> Tensor:
    """[B,T,H,X] -> [N, B*H, C, X], zeros behind the last token."""
    batch, tokens, heads, _ = x.shape
    x = F.pad(x, (0, 0, 0, 0, 0, -tokens % TILE))
    return x.unflatten(1, (-1, TILE)).permute(1, 0, 3, 2, 4).reshape(-1, batch * heads, TILE, x.shape[-1])


def _borders(documents_BT: Tensor, *, heads: int) -> _Borders:
    # Tokens behind the last one join the last document; their keys are zero, so nothing reaches its state.
    padded = F.pad(documents_BT[:, None].double(), (0, -documents_BT.shape[1] % TILE), mode="replicate")
    tiles_NBC = padded[:, 0].unflatten(1, (-1, TILE)).transpose(0, 1)
    before_NBC = torch.cat([tiles_NBC[:1, :, :1] - 1, tiles_NBC[:-1, :, -1:]])
    left_NBC = torch.cat([before_NBC, tiles_NBC[..., :-1]], -1)
    opens, enters = tiles_NBC != left_NBC, tiles_NBC == before_NBC
    leaves = tiles_NBC == tiles_NBC[..., -1:]
    joined = tiles_NBC[..., None] == tiles_NBC[..., None, :]
    opens, joined, enters, leaves = (x.repeat_interleave(heads, 1) for x in (opens, joined, enters, leaves))
    return _Borders(opens, joined, enters[..., None], leaves[..., None])


def _run(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *borders: Tensor
) -> tuple[Tensor, Tensor]:
    """Tiles q, k, g [N,M,C,K], v [N,M,C,V], beta [N,M,C,1] from `state` [M,K,V]: outputs, state behind."""
    between = _Borders(*borders) if borders else None
    decay, rise = _Decay.apply(g, between.opens if between else None)
    decay_end = decay[..., -1, :]
    k_decayed = k * decay
    k_raised = k * rise
    k_to_end = k_raised * decay_end[..., None, :]
    q_decayed = q * decay
    coupling = (beta * (k_decayed @ k_raised.mT)).tril(-1)
    reads = (q_decayed @ k_raised.mT).tril()
    if between:
        coupling, reads = coupling * between.joined, reads * between.joined
        k_to_end = k_to_end * between.leaves
        decay_end = decay_end * between.enters[..., -1, :]
    inverse = _UnitLowerInverse.apply(coupling)
    u, w = (inverse @ torch.cat([beta * v, beta * k_decayed], -1)).split([v.shape[-1], k.shape[-1]], -1)
    if between:
        w, q_decayed = w * between.enters, q_decayed * between.enters

    states, corrections = [], []
    for n in range(q.shape[0]):
        states.append(state)
        correction = torch.baddbmm(u[n], w[n], state, alpha=-1)
        corrections.append(correction)
        state = torch.baddbmm(state * decay_end[n][..., None], k_to_end[n].mT, correction)
    return q_decayed @ torch.stack(states) + reads @ torch.stack(corrections), state


def tiled_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, documents_BT: Tensor | None = None
) -> Tensor:
    """`recurrent_kda` by tiles of 16 tokens; same shapes. Only the state walks from tile to tile.

    Exponentials are taken relative to an earlier token, never to a later one, so the output of a prefix
    doesn't depend on what follows. Of a sequence longer than 1,024 tokens a training pass keeps one state for
    every 1,024 and runs each stretch again going back: 64 states at a time instead of all.
    """
    batch, tokens, heads, _ = q.shape
    tiles = [_to_tiles(x) for x in (q, k, v, g, beta[..., None])]
    if documents_BT is not None:
        tiles += _borders(documents_BT, heads=heads)
    state = q.new_zeros(batch * heads, k.shape[-1], v.shape[-1])
    if len(tiles[0]) <= SEGMENT_TILES:
        out, _ = _run(state, *tiles)
    else:
        outs = []
        for segment in zip(*(x.split(SEGMENT_TILES) for x in tiles), strict=True):
            piece, state = checkpoint(_run, state, *segment, use_reentrant=False, preserve_rng_state=False)
            outs.append(piece)
        out = torch.cat(outs)
    out = out.unflatten(1, (batch, heads)).permute(1, 0, 3, 2, 4).flatten(1, 2)
    return out[:, :tokens]
