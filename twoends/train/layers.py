"""Small parts that several layers share: projections, RMSNorm, SiTU-GLU and the MLP built from it."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Projection(nn.Module):
    """y = x W^T without bias. `matmul_dtype` is what the product runs in (None: the weight's own type)."""

    def __init__(self, in_features: int, out_features: int, *, gain: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.matmul_dtype: torch.dtype | None = None
        self.gain = gain

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Gaussian with standard deviation gain / sqrt(in_features)."""
        std = self.gain / math.sqrt(self.weight.shape[1])
        nn.init.normal_(self.weight, std=std, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        dtype = self.matmul_dtype or self.weight.dtype
        return F.linear(x.to(dtype), self.weight.to(dtype))


def project_together(x: Tensor, projections: list[Projection]) -> list[Tensor]:
    """The outputs of several projections of the same input, computed as one product."""
    dtype = projections[0].matmul_dtype or projections[0].weight.dtype
    weight = torch.cat([p.weight for p in projections]).to(dtype)
    y = F.linear(x.to(dtype), weight)
    return list(y.split([p.weight.shape[0] for p in projections], dim=-1))


class RMSNorm(nn.Module):
    """y = w * x / sqrt(mean x^2 + eps) over the last axis, at least in binary32."""

    def __init__(self, size: int, *, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.weight.dtype)
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class SituGlu(nn.Module):
    """beta tanh(gate / beta) sigmoid(gate) * linear_beta tanh(up / linear_beta).

    The sigmoid takes the uncapped gate. No result is larger than beta * linear_beta.
    """

    def __init__(self, betas: tuple[float, float]) -> None:
        super().__init__()
        self.beta, self.linear_beta = betas

    def forward(self, gate_up: Tensor) -> Tensor:
        """`gate_up` [..., 2 F], gate first -> [..., F]."""
        gate, up = gate_up.chunk(2, -1)
        gate = self.beta * torch.tanh(gate / self.beta) * torch.sigmoid(gate)
        return gate * (self.linear_beta * torch.tanh(up / self.linear_beta))


class SituMlp(nn.Module):
    """down(SiTU(gate(x), up(x))): the dense MLP of layer 0 and the fused shared experts."""

    def __init__(self, width: int, hidden: int, *, betas: tuple[float, float]) -> None:
        super().__init__()
        self.gate_proj = Projection(width, hidden)
        self.up_proj = Projection(width, hidden)
        self.down_proj = Projection(hidden, width, gain=0.5)
        self.activation = SituGlu(betas)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = project_together(x, [self.gate_proj, self.up_proj])
        return self.down_proj(self.activation(torch.cat([gate, up], -1)))
