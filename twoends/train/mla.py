"""Gated multi-head latent attention without positions (spec section 5)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twoends.train.architecture import Architecture
from twoends.train.layers import Projection, RMSNorm, project_together

# The released code builds the two latent norms without naming an epsilon and gets this one.
LATENT_EPS = 1e-6
# Queries that are masked at a time: bounds the mask to this many rows of T.
QUERIES = 512


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
        scale = k.shape[-1] ** -0.5
        if self.training:
            largest_H = largest_logits(q.detach(), k.detach(), documents_BT, scale=scale)
            self.logit_max_H = torch.maximum(self.logit_max_H.to(largest_H.device), largest_H)
        # The fused kernel wants values as wide as keys; the zeros come off again.
        wide = F.pad(v, (0, k.shape[-1] - self.value)) if self.value < k.shape[-1] else v
        out = attend(q, k, wide, documents_BT, scale=scale)
        out = out[..., : self.value].transpose(1, 2).flatten(2)
        return self.o_proj(out * torch.sigmoid(gate))


def _visible(documents_BT: Tensor | None, *, start: int, stop: int, device: torch.device) -> Tensor:
    """Which of the keys 0..stop each query of start..stop may see, [1 or B, 1, queries, keys]."""
    query, key = torch.arange(start, stop, device=device), torch.arange(stop, device=device)
    seen = (key <= query[:, None])[None, None]
    if documents_BT is None:
        return seen
    return seen & (documents_BT[:, start:stop, None] == documents_BT[:, None, :stop])[:, None]


def attend(q: Tensor, k: Tensor, v: Tensor, documents_BT: Tensor | None, *, scale: float) -> Tensor:
    """Causal attention [B,H,T,V], within documents if given. No mask is wider than QUERIES rows."""
    if documents_BT is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    pieces = []
    for start in range(0, q.shape[2], QUERIES):
        stop = min(start + QUERIES, q.shape[2])
        mask = _visible(documents_BT, start=start, stop=stop, device=q.device)
        pieces.append(
            F.scaled_dot_product_attention(
                q[:, :, start:stop], k[:, :, :stop], v[:, :, :stop], attn_mask=mask, scale=scale
            )
        )
    return torch.cat(pieces, 2)


def largest_logits(q: Tensor, k: Tensor, documents_BT: Tensor | None, *, scale: float) -> Tensor:
    """Largest logit of each head over what attention sees, binary32 [H]. The fused kernel doesn't tell it."""
    found = []
    for start in range(0, q.shape[2], QUERIES):
        stop = min(start + QUERIES, q.shape[2])
        logits = q[:, :, start:stop] @ k[:, :, :stop].mT
        mask = _visible(documents_BT, start=start, stop=stop, device=q.device)
        found.append(logits.masked_fill(~mask, float("-inf")).amax((0, 2, 3)))
    return torch.stack(found).amax(0).float() * scale
