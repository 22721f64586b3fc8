"""A draft layer in training: one MLA layer over a frozen model's hidden states, unrolled as it will guess.

The layer is that of model/draft_layer.py. Step 0 of base t reads the target's hidden states at t and the
embedding of token t + 1, and predicts token t + 2. Step s reads its own output of step s - 1 and the
embedding of token t + 1 + s, and predicts token t + 2 + s. So it is trained on what it will see when it
guesses several ids in a row (EAGLE-3's training-time test). What step s may attend to is what the cache holds
then: the rows of step 0 up to t, and its own rows of steps 1 .. s.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from twoends.checkpoint.draft_config import feature_block
from twoends.train.architecture import Architecture
from twoends.train.layers import Projection, RMSNorm, SituMlp, project_together
from twoends.train.mla import GatedLatentAttention
from twoends.train.model import KimiK3


class UnrolledAttention(GatedLatentAttention):
    """The same attention, over the rows of step 0 and one row of each later step."""

    def rows(self, x_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries, keys [B,H,T,K], values [B,H,T,V] and the output gate of some rows."""
        q_a, kv_a, gate = project_together(x_BTD, [self.q_a_proj, self.kv_a_proj_with_mqa, self.g_proj])
        latent, shared = kv_a.split([self.rank, self.rope], -1)
        q = self.q_b_proj(self.q_a_layernorm(q_a)).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k_head, v = kv.split([self.nope, self.value], -1)
        k = torch.cat([k_head, shared[:, None].expand(-1, self.heads, -1, -1)], -1)
        return q, k, v, gate

    def step(self, x_BTD: Tensor, cache: list[tuple[Tensor, Tensor]], seen_BTT: Tensor) -> Tensor:
        """One step's output; its keys and values are appended to `cache`, which begins with step 0's.

        `seen_BTT` says which rows of step 0 a base may see. Rows of later steps belong to their own base.
        """
        q, k, v, gate = self.rows(x_BTD)
        cache.append((k, v))
        scale = q.shape[-1] ** -0.5
        first_k, first_v = cache[0]
        scores = (q @ first_k.mT * scale).masked_fill(~seen_BTT[:, None], float("-inf"))
        own = [(q * later_k).sum(-1, keepdim=True) * scale for later_k, _ in cache[1:]]
        weights = torch.softmax(torch.cat([scores, *own], -1).float(), -1).to(v.dtype)
        size = first_k.shape[2]
        out = weights[..., :size] @ first_v
        for i, (_, later_v) in enumerate(cache[1:]):
            out = out + weights[..., size + i : size + i + 1] * later_v
        return self.o_proj(out.transpose(1, 2).flatten(2) * torch.sigmoid(gate))


class DraftLayer(nn.Module):
    """The layer's parameters under the names of its file (checkpoint/draft_config.py)."""

    def __init__(self, arch: Architecture, *, num_features: int, mlp_width: int) -> None:
        super().__init__()
        width, eps = arch.hidden_size, arch.rms_norm_eps
        self.feature_norms = nn.ModuleList(RMSNorm(width, eps=eps) for _ in range(num_features))
        self.fc = Projection(num_features * width, width)
        self.enorm = RMSNorm(width, eps=eps)
        self.hnorm = RMSNorm(width, eps=eps)
        self.eh_proj = Projection(2 * width, width)
        self.input_layernorm = RMSNorm(width, eps=eps)
        self.self_attn = UnrolledAttention(arch)
        self.post_attention_layernorm = RMSNorm(width, eps=eps)
        betas = (arch.activation_situ_beta, arch.activation_situ_linear_beta)
        self.mlp = SituMlp(width, mlp_width, betas=betas)
        self.norm = RMSNorm(width, eps=eps)

    def initialise(self, seed: int) -> DraftLayer:
        """Draw every matrix from one generator, in module order; returns self."""
        generator = torch.Generator().manual_seed(seed)
        for module in self.modules():
            if isinstance(module, Projection):
                module.reset_parameters(generator)
        return self

    def multiply_in(self, dtype: torch.dtype | None) -> DraftLayer:
        """Run matrix products in `dtype`; returns self."""
        for module in self.modules():
            if isinstance(module, Projection):
                module.matmul_dtype = dtype
        return self

    def unrolled(
        self, features: Sequence[Tensor], embeddings_BTD: Tensor, seen_BTT: Tensor, *, steps: int
    ) -> list[Tensor]:
        """Normalised states for the head, one [B, T - 1 - s, D] for each step s; row t is base t.

        `features` are the target's, [B,T,D] each; `embeddings_BTD` those of the tokens themselves.
        """
        normed = [norm(feature) for norm, feature in zip(self.feature_norms, features, strict=True)]
        g = self.fc(torch.cat(normed, -1)).float()
        cache: list[tuple[Tensor, Tensor]] = []
        found = []
        for s in range(steps):
            # Bases whose next tokens run out have no such step; they are the last ones, so nobody sees them.
            count = embeddings_BTD.shape[1] - 1 - s
            cache = [(k[:, :, :count], v[:, :, :count]) for k, v in cache]
            following = embeddings_BTD[:, 1 + s :]
            g = self._step(g[:, :count], following, cache, seen_BTT[:, :count, :count])
            found.append(self.norm(g))
        return found

    def _step(
        self, g: Tensor, following: Tensor, cache: list[tuple[Tensor, Tensor]], seen_BTT: Tensor
    ) -> Tensor:
        x = self.eh_proj(torch.cat([self.enorm(following), self.hnorm(g)], -1)).float()
        x = x + self.self_attn.step(self.input_layernorm(x), cache, seen_BTT)
        return x + self.mlp(self.post_attention_layernorm(x))


def visible_bases(documents_BT: Tensor) -> Tensor:
    """Which bases a base may see [B,T,T]: itself and those before it, of its own document."""
    tokens = documents_BT.shape[1]
    causal = torch.ones(tokens, tokens, dtype=torch.bool, device=documents_BT.device).tril()
    return causal & (documents_BT[:, :, None] == documents_BT[:, None, :])


@torch.no_grad()
def target_states(
    target: KimiK3, ids_BT: Tensor, documents_BT: Tensor, *, features: Sequence[str]
) -> tuple[list[Tensor], Tensor]:
    """The named hidden states of a frozen model [B,T,D] each, and its probabilities of the next token."""
    trunk = target.model
    sources = trunk.sources(ids_BT, documents_BT)
    final = trunk.mix(sources, trunk.output_attn_res_norm, trunk.output_attn_res_proj)
    probabilities_BTW = torch.softmax(target.lm_head(trunk.norm(final)).float(), -1)
    blocks = [feature_block(feature) for feature in features]
    return [final if block is None else sources[block + 1] for block in blocks], probabilities_BTW
