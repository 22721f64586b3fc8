"""Stable LatentMoE: routed MXFP4 experts in a narrow latent, beside fused shared experts."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twoends.train.architecture import Architecture
from twoends.train.balance import balanced_bias, max_violation
from twoends.train.layers import Projection, RMSNorm, SituGlu, SituMlp
from twoends.train.qat import FakeQuantise

_WEIGHT_SUM_EPS = 1e-20
_ROW_STEP = 128


class Router(nn.Module):
    """Sigmoid scores in binary32; the bias chooses, the unbiased scores weigh."""

    e_score_correction_bias: Tensor

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.top_k, self.scale = arch.num_experts_per_token, arch.routed_scaling_factor
        self.weight = nn.Parameter(torch.empty(arch.num_experts, arch.hidden_size))
        self.register_buffer("e_score_correction_bias", torch.zeros(arch.num_experts))
        self.seen_scores_NE: Tensor | None = None

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Unit-variance logits for a unit-variance input."""
        nn.init.normal_(self.weight, std=1 / math.sqrt(self.weight.shape[1]), generator=generator)

    def forward(self, x_ND: Tensor) -> tuple[Tensor, Tensor]:
        """Chosen experts [N,S] and their weights [N,S], for tokens x [N,D]."""
        scores = torch.sigmoid(F.linear(x_ND.to(self.weight.dtype), self.weight))
        chosen = torch.topk(scores.detach() + self.e_score_correction_bias, self.top_k, dim=-1).indices
        weights = scores.gather(-1, chosen)
        weights = weights / (weights.sum(-1, keepdim=True) + _WEIGHT_SUM_EPS) * self.scale
        if self.training:
            self.seen_scores_NE = scores.detach()
        return chosen, weights

    @torch.no_grad()
    def rebalance(self, *, keep: float) -> float:
        """Move the bias towards the one that balances the last batch; returns that batch's violation.

        `keep` is the share of the old bias.
        """
        if self.seen_scores_NE is None:
            raise RuntimeError("rebalance needs a training forward pass before it")
        bias = self.e_score_correction_bias
        chosen = torch.topk(self.seen_scores_NE + bias, self.top_k, dim=-1).indices
        load = torch.bincount(chosen.flatten(), minlength=len(bias))
        bias.mul_(keep).add_(balanced_bias(self.seen_scores_NE, bias, top_k=self.top_k), alpha=1 - keep)
        self.seen_scores_NE = None
        return max_violation(load)


class ExpertBank(nn.Module):
    """All routed experts of a layer as stacked matrices: w1 gate [E,F,Z], w3 up [E,F,Z], w2 down [E,Z,F]."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        experts, hidden, latent = arch.num_experts, arch.moe_intermediate_size, arch.routed_expert_hidden_size
        self.w1 = nn.Parameter(torch.empty(experts, hidden, latent))
        self.w2 = nn.Parameter(torch.empty(experts, latent, hidden))
        self.w3 = nn.Parameter(torch.empty(experts, hidden, latent))
        self.quantise = FakeQuantise()
        self.activation = SituGlu((arch.activation_situ_beta, arch.activation_situ_linear_beta))
        self.matmul_dtype: torch.dtype | None = None

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Gaussian with standard deviation 1 / sqrt(inputs)."""
        for weight in (self.w1, self.w2, self.w3):
            nn.init.normal_(weight, std=1 / math.sqrt(weight.shape[-1]), generator=generator)

    def forward(self, z_ERZ: Tensor) -> Tensor:
        """Outputs [E,R,Z] for R rows of each expert (rows of zeros give zeros)."""
        dtype = self.matmul_dtype or self.w1.dtype
        gate_up = torch.cat([self.quantise(self.w1), self.quantise(self.w3)], 1).to(dtype)
        down = self.quantise(self.w2).to(dtype)
        return torch.bmm(self.activation(torch.bmm(z_ERZ.to(dtype), gate_up.mT)), down.mT)


def expert_slots(chosen_NS: Tensor, *, num_experts: int) -> tuple[Tensor, int]:
    """Where each choice stands when experts have equal room, [N*S], and that room in rows.

    Every expert gets as many rows as the busiest needs, rounded up so that few shapes occur. None is dropped;
    inside an expert the order of tokens is kept.
    """
    chosen = chosen_NS.flatten()
    load = torch.bincount(chosen, minlength=num_experts)
    room = int(-(-load.max() // _ROW_STEP) * _ROW_STEP)
    order = chosen.argsort(stable=True)
    first = (load.cumsum(0) - load)[chosen[order]]
    rank = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device) - first)
    return chosen * room + rank, room


class LatentMoe(nn.Module):
    """x [B,T,D] -> up(norm(sum of weighted experts of down(x))) + shared(x) (spec sections 7.1 to 7.3)."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        width, latent = arch.hidden_size, arch.routed_expert_hidden_size
        betas = (arch.activation_situ_beta, arch.activation_situ_linear_beta)
        self.gate = Router(arch)
        self.routed_expert_down_proj = Projection(width, latent)
        self.experts = ExpertBank(arch)
        self.routed_expert_norm = RMSNorm(latent, eps=arch.rms_norm_eps)
        self.routed_expert_up_proj = Projection(latent, width, gain=0.5)
        shared = arch.num_shared_experts * arch.moe_intermediate_size
        self.shared_experts = SituMlp(width, shared, betas=betas)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_ND = x_BTD.flatten(0, 1)
        chosen_NS, weights_NS = self.gate(x_ND)
        z_NZ = self.routed_expert_down_proj(x_ND)
        experts, top_k = self.gate.weight.shape[0], chosen_NS.shape[1]
        slots, room = expert_slots(chosen_NS, num_experts=experts)
        rows = z_NZ.new_zeros(experts * room, z_NZ.shape[1])
        rows = rows.index_copy(0, slots, z_NZ.repeat_interleave(top_k, 0))
        rows = self.experts(rows.unflatten(0, (experts, room))).flatten(0, 1)
        y_NSZ = rows[slots].unflatten(0, chosen_NS.shape).to(weights_NS.dtype)
        routed = self.routed_expert_norm((y_NSZ * weights_NS[..., None]).sum(1))
        out = self.routed_expert_up_proj(routed) + self.shared_experts(x_ND)
        return out.unflatten(0, x_BTD.shape[:2])
