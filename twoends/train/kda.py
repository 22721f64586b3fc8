"""Kimi Delta Attention: the recurrence that defines it, the tile form that trains, and the layer.

Letters: B batch, T tokens, H heads, K key channels, V value channels, N tiles, C tokens of a tile.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twoends.train.architecture import Architecture
from twoends.train.layers import Projection, RMSNorm, project_together

# A gate of at least -5 per token keeps exp(-sum) over 16 tokens below exp(80) = 5.5e34, inside binary32;
# 32 tokens would overflow.
TILE = 16
_L2_EPS = 1e-6


def recurrent_kda(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The definition, token by token. q (scaled), k, g [B,T,H,K], v [B,T,H,V], beta [B,T,H] -> [B,T,H,V].

    Decay the state, correct what it predicts for k towards v, then read it with q.
    """
    state_BHKV = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    outputs = []
    for t in range(q.shape[1]):
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


def _to_tiles(x: Tensor, tile: int) -> Tensor:
    """[B,T,H,X] -> [N, B*H, C, X], zeros behind the last token."""
    batch, tokens, heads, _ = x.shape
    x = F.pad(x, (0, 0, 0, 0, 0, -tokens % tile))
    return x.unflatten(1, (-1, tile)).permute(1, 0, 3, 2, 4).reshape(-1, batch * heads, tile, x.shape[-1])


def tiled_kda(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """`recurrent_kda` by tiles of 16 tokens; same shapes. Only the state walks from tile to tile.

    Exponentials are taken relative to the start of the tile, never to a later token, so the output of a
    prefix doesn't depend on what follows.
    """
    batch, tokens, heads, _ = q.shape
    q, k, v, g = (_to_tiles(x, TILE) for x in (q, k, v, g))
    beta = _to_tiles(beta[..., None], TILE)
    total = g.cumsum(-2)
    decay = total.exp()
    decay_end = decay[..., -1, :]
    k_decayed = k * decay
    k_raised = k * (-total).exp()
    k_to_end = k_raised * decay_end[..., None, :]
    q_decayed = q * decay

    coupling = (beta * (k_decayed @ k_raised.mT)).tril(-1)
    inverse = _UnitLowerInverse.apply(coupling)
    u, w = (inverse @ torch.cat([beta * v, beta * k_decayed], -1)).split([v.shape[-1], k.shape[-1]], -1)

    state = q.new_zeros(q.shape[1], k.shape[-1], v.shape[-1])
    states, corrections = [], []
    for n in range(q.shape[0]):
        states.append(state)
        correction = torch.baddbmm(u[n], w[n], state, alpha=-1)
        corrections.append(correction)
        state = torch.baddbmm(state * decay_end[n][..., None], k_to_end[n].mT, correction)
    reads = (q_decayed @ k_raised.mT).tril()
    out = q_decayed @ torch.stack(states) + reads @ torch.stack(corrections)
    out = out.unflatten(1, (batch, heads)).permute(1, 0, 3, 2, 4).flatten(1, 2)
    return out[:, :tokens]


class ShortConvolution(nn.Module):
    """Depthwise causal convolution followed by SiLU; the last tap multiplies the current token."""

    def __init__(self, channels: int, taps: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, taps))

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Uniform in +-1/sqrt(taps), as a convolution of one channel."""
        bound = 1 / math.sqrt(self.weight.shape[-1])
        nn.init.uniform_(self.weight, -bound, bound, generator=generator)


def short_convolution(x: Tensor, weight: Tensor) -> Tensor:
    """silu(sum_j weight[c, 0, j] x[t - taps + 1 + j, c]), x [B,T,P], weight [P,1,taps]; zeros before 0."""
    taps = weight.shape[-1]
    padded = F.pad(x, (0, 0, taps - 1, 0))
    y = sum(padded[:, j : j + x.shape[1]] * weight[:, 0, j] for j in range(taps))
    return F.silu(y)


def l2_normalise(x: Tensor) -> Tensor:
    """x / sqrt(sum x^2 + 1e-6) over the last axis. The epsilon joins the sum, not the mean."""
    return x * (x.square().sum(-1, keepdim=True) + _L2_EPS).rsqrt()


class KimiDeltaAttention(nn.Module):
    """KDA mixer of one layer: x [B,T,D] -> [B,T,D] (spec sections 4.1 to 4.7)."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        width, rank = arch.kda_width, arch.kda_head_dim
        self.heads, self.lower_bound = arch.kda_num_heads, arch.gate_lower_bound
        self.q_proj = Projection(arch.hidden_size, width)
        self.k_proj = Projection(arch.hidden_size, width)
        self.v_proj = Projection(arch.hidden_size, width)
        self.g_proj = Projection(arch.hidden_size, width)
        self.f_a_proj = Projection(arch.hidden_size, rank)
        self.f_b_proj = Projection(rank, width, gain=0.5)
        self.b_proj = Projection(arch.hidden_size, self.heads)
        self.o_proj = Projection(width, arch.hidden_size, gain=0.5)
        self.q_conv1d = ShortConvolution(width, arch.short_conv_kernel_size)
        self.k_conv1d = ShortConvolution(width, arch.short_conv_kernel_size)
        self.v_conv1d = ShortConvolution(width, arch.short_conv_kernel_size)
        self.A_log = nn.Parameter(torch.zeros(self.heads))
        self.dt_bias = nn.Parameter(torch.empty(width))
        self.o_norm = RMSNorm(arch.kda_head_dim, eps=arch.rms_norm_eps)

    def reset_parameters(self, generator: torch.Generator) -> None:
        """A_log 0; dt_bias such that a channel forgets between .2 % and 40 % per token (log-uniform)."""
        nn.init.zeros_(self.A_log)
        low, high = math.log(0.002), math.log(0.5)
        rate = torch.empty_like(self.dt_bias).uniform_(low, high, generator=generator).exp()
        with torch.no_grad():
            self.dt_bias.copy_(torch.logit(rate / -self.lower_bound))

    def decay(self, raw: Tensor) -> Tensor:
        """Log decay [B,T,H,K]: lower_bound * sigmoid(exp(A_log[head]) * (raw + dt_bias))."""
        shifted = (raw.to(self.dt_bias.dtype) + self.dt_bias).unflatten(-1, (self.heads, -1))
        return self.lower_bound * torch.sigmoid(self.A_log.exp()[:, None] * shifted)

    def forward(self, x: Tensor, documents_BT: Tensor | None = None) -> Tensor:
        dtype = self.dt_bias.dtype
        q, k, v, gate, low_rank, b = project_together(
            x, [self.q_proj, self.k_proj, self.v_proj, self.g_proj, self.f_a_proj, self.b_proj]
        )
        filters = torch.cat([self.q_conv1d.weight, self.k_conv1d.weight, self.v_conv1d.weight])
        mixed = short_convolution(torch.cat([q, k, v], -1).to(dtype), filters)
        q, k, v = (y.unflatten(-1, (self.heads, -1)) for y in mixed.chunk(3, -1))
        q = l2_normalise(q) * q.shape[-1] ** -0.5
        g = self.decay(self.f_b_proj(low_rank))
        out = tiled_kda(q, l2_normalise(k), v, g, torch.sigmoid(b.to(dtype)))
        out = self.o_norm(out).flatten(2) * torch.sigmoid(gate.to(dtype))
        return self.o_proj(out)
