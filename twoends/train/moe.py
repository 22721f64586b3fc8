"""Stable LatentMoE: routed MXFP4 experts in a narrow latent, beside fused shared experts."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twoends.train.architecture import Architecture
from twoends.train.balance import auxiliary_loss, margin_counts, recomputing
from twoends.train.expert_rows import (
    ExpertRows,
    block_rows,
    expert_rows,
    multiply,
    to_experts,
    to_tokens,
)
from twoends.train.layers import Projection, RMSNorm, SituGlu, SituMlp
from twoends.train.qat import Bytes, activation_quantiser, packed_bytes, weight_quantiser

_WEIGHT_SUM_EPS = 1e-20


class Router(nn.Module):
    """Sigmoid scores in binary32; the bias chooses, the unbiased scores weigh.

    In training it counts, per expert: choices, and margins by bin when quantiles balance.
    """

    e_score_correction_bias: Tensor

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.top_k, self.scale = arch.num_experts_per_token, arch.routed_scaling_factor
        self.weight = nn.Parameter(torch.empty(arch.num_experts, arch.hidden_size))
        self.register_buffer("e_score_correction_bias", torch.zeros(arch.num_experts))
        self.balance = "quantile"
        # Columns: tokens that chose the expert, tokens without a finite cutoff, then the bins of margins.
        self.counts: Tensor | None = None
        self.auxiliary: Tensor | None = None

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Unit-variance logits for a unit-variance input."""
        nn.init.normal_(self.weight, std=1 / math.sqrt(self.weight.shape[1]), generator=generator)

    def forward(self, x_ND: Tensor, counted_N: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Chosen experts [N,S] and their weights [N,S], for tokens x [N,D].

        `counted_N` tells which tokens are text; None means all. Padding is routed and not counted.
        """
        scores = torch.sigmoid(F.linear(x_ND.to(self.weight.dtype), self.weight))
        top = torch.topk(scores.detach() + self.e_score_correction_bias, self.top_k + 1, dim=-1)
        chosen = top.indices[:, : self.top_k]
        weights = scores.gather(-1, chosen)
        weights = weights / (weights.sum(-1, keepdim=True) + _WEIGHT_SUM_EPS) * self.scale
        if self.training:
            self._observe(scores, chosen, top.values[:, -1], counted_N)
        return chosen, weights

    def _observe(
        self, scores_NE: Tensor, chosen_NS: Tensor, cutoff_N: Tensor, counted_N: Tensor | None
    ) -> None:
        """Count a training pass, once: a pass that checkpointing repeats was counted before."""
        experts = scores_NE.shape[1]
        seen, chosen, cutoff = scores_NE.detach(), chosen_NS, cutoff_N
        if counted_N is not None:
            seen, chosen, cutoff = seen[counted_N], chosen[counted_N], cutoff[counted_N]
        load = torch.bincount(chosen.flatten(), minlength=experts)
        auxiliary = None
        if self.balance == "auxiliary":
            auxiliary = auxiliary_loss(scores_NE, load, counted_N=counted_N)
        if recomputing():
            return
        self.auxiliary = auxiliary
        columns = [load[:, None], (~cutoff.isfinite()).sum().expand(experts, 1)]
        if self.balance == "quantile":
            columns.append(margin_counts(seen, cutoff, self.e_score_correction_bias))
        counts = torch.cat(columns, 1)
        self.counts = counts if self.counts is None else self.counts + counts

    def take_counts(self) -> Tensor:
        """What was counted since the last call [E, 2 or 1002]; counting begins anew."""
        if self.counts is None:
            raise RuntimeError("rebalance needs a training forward pass before it")
        counts, self.counts = self.counts, None
        return counts


class ExpertBank(nn.Module):
    """All routed experts of a layer: w1, w3 [E,F,Z], w2 [E,Z,F], each multiplying just its own rows.

    `quantise` is what the forward pass makes of the weights, `quantise_input` what it makes of the inputs of
    both products. `originals` holds the bytes of loaded experts by (matrix, expert).
    """

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        experts, width, latent = (
            arch.num_experts,
            arch.moe_intermediate_size,
            arch.routed_expert_hidden_size,
        )
        self.w1 = nn.Parameter(torch.empty(experts, width, latent))
        self.w2 = nn.Parameter(torch.empty(experts, latent, width))
        self.w3 = nn.Parameter(torch.empty(experts, width, latent))
        self.quantise: nn.Module = weight_quantiser("mxfp4")
        self.quantise_input: nn.Module = activation_quantiser("none")
        self.originals: dict[tuple[str, int], tuple[Bytes, Bytes]] = {}
        self.activation = SituGlu((arch.activation_situ_beta, arch.activation_situ_linear_beta))
        self.matmul_dtype: torch.dtype | None = None

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Gaussian with standard deviation 1 / sqrt(inputs)."""
        for weight in (self.w1, self.w2, self.w3):
            nn.init.normal_(weight, std=1 / math.sqrt(weight.shape[-1]), generator=generator)

    def forward(self, z_NZ: Tensor, rows: ExpertRows) -> Tensor:
        """Outputs [N,S,Z] of each token's experts for inputs that already went through quantise_input."""
        dtype = self.matmul_dtype or self.w1.dtype
        gate_up = torch.cat([self.quantise(self.w1), self.quantise(self.w3)], 1).to(dtype)
        down = self.quantise(self.w2).to(dtype)
        hidden = self.activation(multiply(to_experts(z_NZ.to(dtype), rows), gate_up, rows))
        return to_tokens(multiply(self.quantise_input(hidden), down, rows), rows)

    def stored_bytes(self, matrix: str, expert: int) -> tuple[Bytes, Bytes]:
        """(packed, scale) of one expert's matrix as the last forward pass multiplied it."""
        weight = getattr(self, matrix)[expert]
        return packed_bytes(weight, original=self.originals.get((matrix, expert)))


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

    def forward(self, x_BTD: Tensor, documents_BT: Tensor | None = None) -> Tensor:
        """`documents_BT` names padding (-1), which routers don't count."""
        x_ND = x_BTD.flatten(0, 1)
        counted_N = None if documents_BT is None else documents_BT.flatten() >= 0
        # Quantised before it is copied to its experts: a block lies within a token, so nothing differs. And
        # before the router, which ends a graph: a compiler would else quantise every copy.
        z_NZ = self.experts.quantise_input(self.routed_expert_down_proj(x_ND))
        chosen_NS, weights_NS = self.gate(x_ND, counted_N)
        w1 = self.experts.w1
        block = block_rows(chosen_NS.numel(), w1, dtype=z_NZ.dtype)
        rows = expert_rows(chosen_NS, num_experts=len(w1), block=block)
        y_NSZ = self.experts(z_NZ, rows).to(weights_NS.dtype)
        routed = self.routed_expert_norm((y_NSZ * weights_NS[..., None]).sum(1))
        out = self.routed_expert_up_proj(routed) + self.shared_experts(x_ND)
        return out.unflatten(0, x_BTD.shape[:2])
