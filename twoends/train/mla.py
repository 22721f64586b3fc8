"""Gated multi-head latent attention without positions (spec section 5)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from twoends.train.architecture import Architecture
from twoends.train.attention import attend
from twoends.train.layers import Projection, RMSNorm, project_together

# The released code builds the two latent norms without naming an epsilon and gets this one.
LATENT_EPS = 1e-6


class GatedLatentAttention(nn.Module):
    """MLA mixer of one layer: x [B,T,D] -> [B,T,D]. No rotation: `rope` names the shared keys."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.heads = arch.num_attention_heads
        self.nope, self.rope, self.value = arch.qk_nope_head_dim, arch.qk_rope_head_dim, arch.v_head_dim
        self.rank = arch.kv_lora_rank
        self.q_a_proj = Projection(arch.hidden_size, arch.q_lora_rank)
        self.q_a_layernorm = RMSNorm(arch.q_lora_rank, eps=LATENT_EPS)
        self.q_b_proj = Projection(arch.q_lora_rank, self.heads * arch.qk_head_dim)
        self.kv_a_proj_with_mqa = Projection(arch.hidden_size, arch.kv_lora_rank + self.rope)
        self.kv_a_layernorm = RMSNorm(arch.kv_lora_rank, eps=LATENT_EPS)
        self.kv_b_proj = Projection(arch.kv_lora_rank, self.heads * (self.nope + self.value))
        self.g_proj = Projection(arch.hidden_size, self.heads * self.value)
        self.o_proj = Projection(self.heads * self.value, arch.hidden_size, gain=0.5)
        self.forget_logits()

    def forget_logits(self) -> None:
        """Begin a new record of the largest logit of each head."""
        self.logit_max_H = torch.full((self.heads,), float("-inf"))

    def forward(self, x: Tensor, documents_BT: Tensor | None = None) -> Tensor:
        """Tokens of a row see those before them, of their own document if `documents_BT` is given."""
        q_a, kv_a, gate = project_together(x, [self.q_a_proj, self.kv_a_proj_with_mqa, self.g_proj])
        latent, shared = kv_a.split([self.rank, self.rope], -1)
        q = self.q_b_proj(self.q_a_layernorm(q_a)).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k_head, v = kv.split([self.nope, self.value], -1)
        k = torch.cat([k_head, shared[:, None].expand(-1, self.heads, -1, -1)], -1)
        out, largest_H = attend(q, k, v, documents_BT, scale=k.shape[-1] ** -0.5, watch=self.training)
        if largest_H is not None:
            self.logit_max_H = torch.maximum(self.logit_max_H.to(largest_H.device), largest_H.float())
        out = out.transpose(1, 2).flatten(2)
        return self.o_proj(out * torch.sigmoid(gate))
