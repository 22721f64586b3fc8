"""Kimi K3's text model as a PyTorch module, its parameters under the released names.

The experts of a layer are stacked here (`experts.w1` [E, ...]); `export.py` takes them apart.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twoends.train.architecture import Architecture
from twoends.train.attnres import DepthMix, DepthQuery
from twoends.train.kda import KimiDeltaAttention
from twoends.train.layers import Projection, RMSNorm, SituMlp
from twoends.train.mla import GatedLatentAttention
from twoends.train.moe import ExpertBank, LatentMoe, Router
from twoends.train.qat import FakeQuantise


class DecoderLayer(nn.Module):
    """One layer: depth mix, token mixer, depth mix, MLP or MoE."""

    def __init__(self, arch: Architecture, layer: int) -> None:
        super().__init__()
        width, eps = arch.hidden_size, arch.rms_norm_eps
        betas = (arch.activation_situ_beta, arch.activation_situ_linear_beta)
        self.mix = DepthMix()
        self.opens_block = layer % arch.attn_res_block_size == 0
        self.self_attention_res_norm = RMSNorm(width, eps=eps)
        self.self_attention_res_proj = DepthQuery(width)
        self.input_layernorm = RMSNorm(width, eps=eps)
        self.self_attn = KimiDeltaAttention(arch) if arch.is_kda(layer) else GatedLatentAttention(arch)
        self.mlp_res_norm = RMSNorm(width, eps=eps)
        self.mlp_res_proj = DepthQuery(width)
        self.post_attention_layernorm = RMSNorm(width, eps=eps)
        if arch.is_moe(layer):
            self.block_sparse_moe = LatentMoe(arch)
        else:
            self.mlp = SituMlp(width, arch.intermediate_size, betas=betas)

    def forward(self, prefix: Tensor, blocks: list[Tensor]) -> Tensor:
        """The new running sum [B,T,D]; appends to `blocks` when this layer opens one.

        The mixes are read by the sub-layers and never written back: the running sum stays the raw sum.
        """
        h = prefix
        if blocks:
            h = self.mix([*blocks, prefix], self.self_attention_res_norm, self.self_attention_res_proj)
        mixed = self.self_attn(self.input_layernorm(h)).to(prefix.dtype)
        if self.opens_block:
            blocks.append(prefix)
            prefix = mixed
        else:
            prefix = prefix + mixed
        h = self.mix([*blocks, prefix], self.mlp_res_norm, self.mlp_res_proj)
        feed = self.block_sparse_moe if hasattr(self, "block_sparse_moe") else self.mlp
        return prefix + feed(self.post_attention_layernorm(h))


class Trunk(nn.Module):
    """Embedding, layers and final norm: ids [B,T] -> hidden [B,T,D]."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.mix = DepthMix()
        self.embed_tokens = nn.Embedding(arch.vocab_size, arch.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(arch, n) for n in range(arch.num_hidden_layers))
        self.output_attn_res_norm = RMSNorm(arch.hidden_size, eps=arch.rms_norm_eps)
        self.output_attn_res_proj = DepthQuery(arch.hidden_size)
        self.norm = RMSNorm(arch.hidden_size, eps=arch.rms_norm_eps)

    def forward(self, ids_BT: Tensor) -> Tensor:
        prefix = self.embed_tokens(ids_BT)
        blocks: list[Tensor] = []
        for layer in self.layers:
            prefix = layer(prefix, blocks)
        return self.norm(self.mix([*blocks, prefix], self.output_attn_res_norm, self.output_attn_res_proj))


class KimiK3(nn.Module):
    """The whole text model: ids [B,T] -> logits [B,T,W]."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.arch = arch
        self.model = Trunk(arch)
        self.lm_head = Projection(arch.hidden_size, arch.vocab_size, gain=0.5)

    def initialise(self, seed: int) -> KimiK3:
        """Draw every parameter from one generator, in module order; returns self."""
        generator = torch.Generator().manual_seed(seed)
        nn.init.normal_(self.model.embed_tokens.weight, std=0.2, generator=generator)
        for module in self.modules():
            reset = getattr(module, "reset_parameters", None)
            if reset is not None and not isinstance(module, nn.Embedding):
                reset(generator)
        return self

    def multiply_in(self, dtype: torch.dtype | None) -> KimiK3:
        """Run matrix products in `dtype`; router, norms, KDA state and depth mixes keep the parameter's."""
        for module in self.modules():
            if hasattr(module, "matmul_dtype"):
                module.matmul_dtype = dtype
        return self

    def compile_parts(self) -> KimiK3:
        """Let TorchInductor fuse the elementwise work of every part whose shapes stay; returns self."""
        fixed = (KimiDeltaAttention, GatedLatentAttention, SituMlp, DepthMix, FakeQuantise)
        for module in self.modules():
            if isinstance(module, fixed):
                module.compile(dynamic=False)
            elif isinstance(module, ExpertBank):
                module.activation.compile(dynamic=True)
        return self

    def routers(self) -> list[Router]:
        """The routers in layer order."""
        return [module for module in self.modules() if isinstance(module, Router)]

    def forward(self, ids_BT: Tensor) -> Tensor:
        return self.lm_head(self.model(ids_BT))

    def loss(self, ids_BT: Tensor, targets_BT: Tensor, *, ignore: int) -> Tensor:
        """Mean cross-entropy in nats over targets that aren't `ignore`."""
        logits = self(ids_BT).flatten(0, 1).float()
        return F.cross_entropy(logits, targets_BT.flatten(), ignore_index=ignore)
