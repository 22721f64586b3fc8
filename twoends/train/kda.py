"""Kimi Delta Attention as a layer; its recurrence is in delta_rule.py.

Letters: B batch, T tokens, H heads, K key channels, P = H K channels, D width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from twoends.train.architecture import Architecture
from twoends.train.convolution import ShortConvolution, short_convolution
from twoends.train.delta_rule import tiled_kda
from twoends.train.kda_choice import Convolution, Kernel
from twoends.train.layers import Projection, RMSNorm, project_together

_L2_EPS = 1e-6


def l2_normalise(x: Tensor) -> Tensor:
    """x / sqrt(sum x^2 + 1e-6) over the last axis. The epsilon joins the sum, not the mean."""
    return x * (x.square().sum(-1, keepdim=True) + _L2_EPS).rsqrt()


class KimiDeltaAttention(nn.Module):
    """KDA mixer of one layer: x [B,T,D] -> [B,T,D] (spec sections 4.1 to 4.7)."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        width, rank = arch.kda_width, arch.kda_head_dim
        self.heads, self.lower_bound = arch.kda_num_heads, arch.gate_lower_bound
        self.kernel: Kernel = tiled_kda
        self.convolve: Convolution = short_convolution
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
        mixed = self.convolve(torch.cat([q, k, v], -1).to(dtype), filters, documents_BT)
        q, k, v = (y.unflatten(-1, (self.heads, -1)) for y in mixed.chunk(3, -1))
        q = l2_normalise(q) * q.shape[-1] ** -0.5
        g = self.decay(self.f_b_proj(low_rank))
        out = self.kernel(q, l2_normalise(k), v, g, torch.sigmoid(b.to(dtype)), documents_BT)
        out = self.o_norm(out).flatten(2) * torch.sigmoid(gate.to(dtype))
        return self.o_proj(out)
