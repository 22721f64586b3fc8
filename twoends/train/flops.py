"""What a step should cost in matrix products, and how fast this machine makes them."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from twoends.train.architecture import Architecture
from twoends.train.delta_rule import TILE

# A backward pass makes two products where the forward pass made one.
_TRAIN_OVER_FORWARD = 3
_SIDE = 1024
_TRIALS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFlops:
    """Operations of one token's forward pass (a multiply and an add are two); only matrix products count."""

    token_mixers: int
    experts: int
    dense: int
    head: int

    @property
    def forward(self) -> int:
        """All of the forward pass."""
        return self.token_mixers + self.experts + self.dense + self.head

    @property
    def train(self) -> int:
        """Forward and backward. What is computed twice to save memory counts once."""
        return _TRAIN_OVER_FORWARD * self.forward


def token_flops(arch: Architecture, *, row_tokens: int) -> TokenFlops:
    """The model's own operations per token, in rows of `row_tokens`; padding and masks don't count."""
    width, latent, hidden = arch.hidden_size, arch.routed_expert_hidden_size, arch.moe_intermediate_size
    num_moe = sum(arch.is_moe(layer) for layer in range(arch.num_hidden_layers))
    num_kda = sum(arch.is_kda(layer) for layer in range(arch.num_hidden_layers))
    num_mla, num_dense = arch.num_hidden_layers - num_kda, arch.num_hidden_layers - num_moe
    shared = 3 * width * arch.num_shared_experts * hidden
    moe = width * arch.num_experts + 2 * width * latent + shared
    experts = arch.num_experts_per_token * 3 * latent * hidden
    return TokenFlops(
        token_mixers=num_kda * _kda_flops(arch) + num_mla * _mla_flops(arch, row_tokens),
        experts=2 * num_moe * experts,
        dense=2 * (num_moe * moe + num_dense * 3 * width * arch.intermediate_size),
        head=2 * width * arch.vocab_size,
    )


def _kda_flops(arch: Architecture) -> int:
    """Projections, and the products of one tile shared out over its tokens."""
    width, inner, head = arch.hidden_size, arch.kda_width, arch.kda_head_dim
    projections = width * (5 * inner + head + arch.kda_num_heads) + head * inner
    tile = 12 * TILE**3 + 10 * TILE**2 * head + 6 * TILE * head**2
    return 2 * projections + arch.kda_num_heads * tile // TILE


def _mla_flops(arch: Architecture, row_tokens: int) -> int:
    """Projections, and scores and values over half a row on average."""
    width, heads, value = arch.hidden_size, arch.num_attention_heads, arch.v_head_dim
    projections = (
        width * arch.q_lora_rank
        + arch.q_lora_rank * heads * arch.qk_head_dim
        + width * (arch.kv_lora_rank + arch.qk_rope_head_dim)
        + arch.kv_lora_rank * heads * (arch.qk_nope_head_dim + value)
        + 2 * width * heads * value
    )
    attention = heads * (arch.qk_head_dim + value) * (row_tokens + 1)
    return 2 * projections + attention


def matmul_rate(*, device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a product of two 1,024 x 1,024 matrices on torch's threads: the best of five."""
    a, b = (torch.randn(_SIDE, _SIDE, device=device).to(dtype) for _ in range(2))
    torch.mm(a, b)
    best_s = float("inf")
    for _ in range(_TRIALS):
        _settle(device)
        began_s = time.perf_counter()
        torch.mm(a, b)
        _settle(device)
        best_s = min(best_s, time.perf_counter() - began_s)
    return 2 * _SIDE**3 / best_s


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
