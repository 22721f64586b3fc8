"""Multi-token prediction: one more layer that predicts the token after the next. Training only.

Position t joins the trunk's hidden state with the embedding of token t + 1 and predicts token t + 2 through
the model's own head. The layer is plain: gated MLA, then the mixture, ordinary residuals, no depth mixes.
The released checkpoints hold no such layer (num_nextn_predict_layers 0), so export leaves it out.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twoends.train.architecture import Architecture
from twoends.train.layers import Projection, RMSNorm
from twoends.train.mla import GatedLatentAttention
from twoends.train.moe import LatentMoe

MTP_WEIGHT = 0.1


class NextNextLayer(nn.Module):
    """Hidden states and embeddings of the next tokens [B,T,D] -> hidden states for the head [B,T,D]."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        width, eps = arch.hidden_size, arch.rms_norm_eps
        self.enorm = RMSNorm(width, eps=eps)
        self.hnorm = RMSNorm(width, eps=eps)
        self.eh_proj = Projection(2 * width, width)
        self.input_layernorm = RMSNorm(width, eps=eps)
        self.self_attn = GatedLatentAttention(arch)
        self.post_attention_layernorm = RMSNorm(width, eps=eps)
        self.block_sparse_moe = LatentMoe(arch)
        self.norm = RMSNorm(width, eps=eps)

    def forward(self, hidden: Tensor, following: Tensor, documents_BT: Tensor | None) -> Tensor:
        joined = torch.cat([self.enorm(following), self.hnorm(hidden)], -1)
        x = self.eh_proj(joined).to(hidden.dtype)
        x = x + self.self_attn(self.input_layernorm(x), documents_BT)
        x = x + self.block_sparse_moe(self.post_attention_layernorm(x), documents_BT)
        return self.norm(x)


def second_targets(targets_BT: Tensor, documents_BT: Tensor | None, *, ignore: int) -> Tensor:
    """The token after the next of each position; `ignore` where it is missing or of another document."""
    second = F.pad(targets_BT[:, 1:], (0, 1), value=ignore)
    second = torch.where(targets_BT == ignore, ignore, second)
    if documents_BT is not None:
        # The target behind a document's last token is the next one's first; what follows that isn't ours.
        same = F.pad(documents_BT[:, 1:] == documents_BT[:, :-1], (0, 1))
        second = torch.where(same, second, ignore)
    return second
