"""Kimi K3's text model as a PyTorch module, its parameters under the released names.

The experts of a layer are stacked here (`experts.w1` [E, ...]); `export.py` takes them apart.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from twoends.train.architecture import Architecture
from twoends.train.attnres import DepthMix, DepthQuery, NormedMix
from twoends.train.balance import known_balance
from twoends.train.head_loss import HeadLoss
from twoends.train.kda import KimiDeltaAttention
from twoends.train.kda_choice import KdaChoice
from twoends.train.layers import Projection, RMSNorm, SituMlp
from twoends.train.mla import GatedLatentAttention
from twoends.train.moe import ExpertBank, LatentMoe, Router
from twoends.train.mtp import MTP_WEIGHT, NextNextLayer, second_targets
from twoends.train.qat import activation_quantiser, weight_quantiser

# More than any part of Kimi K3 needs: nine numbers of sources in 93 layers, each in up to four forms.
_COMPILED_FORMS = 64


class DecoderLayer(nn.Module):
    """One layer: depth mix, token mixer, depth mix, MLP or MoE."""

    def __init__(self, arch: Architecture, layer: int) -> None:
        super().__init__()
        width, eps = arch.hidden_size, arch.rms_norm_eps
        betas = (arch.activation_situ_beta, arch.activation_situ_linear_beta)
        self.read = NormedMix()
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

    def forward(
        self,
        blocks: list[Tensor],
        prefix: Tensor,
        added: Tensor | None,
        documents_BT: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """From a running sum in two terms [B,T,D], `prefix` + `added`, the next one in two terms.

        A layer that opens a block ends the one before it: `prefix`, with nothing added. The mixes are read by
        the sub-layers and never written back: the running sum stays the raw sum.
        """
        norms = (self.self_attention_res_norm, self.self_attention_res_proj, self.input_layernorm)
        prefix, x = self.read(blocks, prefix, added, norms)
        mixed = self.self_attn(x, documents_BT)
        norms = (self.mlp_res_norm, self.mlp_res_proj, self.post_attention_layernorm)
        if self.opens_block:
            prefix, x = self.read([*blocks, prefix], mixed.to(prefix.dtype), None, norms)
        else:
            prefix, x = self.read(blocks, prefix, mixed, norms)
        if hasattr(self, "block_sparse_moe"):
            return prefix, self.block_sparse_moe(x, documents_BT)
        return prefix, self.mlp(x)


class Trunk(nn.Module):
    """Embedding, layers and final norm: ids [B,T] -> hidden [B,T,D]."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.mix = DepthMix()
        self.read = NormedMix()
        self.embed_tokens = nn.Embedding(arch.vocab_size, arch.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(arch, n) for n in range(arch.num_hidden_layers))
        self.output_attn_res_norm = RMSNorm(arch.hidden_size, eps=arch.rms_norm_eps)
        self.output_attn_res_proj = DepthQuery(arch.hidden_size)
        self.norm = RMSNorm(arch.hidden_size, eps=arch.rms_norm_eps)
        self.recompute = False

    def forward(self, ids_BT: Tensor, documents_BT: Tensor | None = None) -> Tensor:
        norms = (self.output_attn_res_norm, self.output_attn_res_proj, self.norm)
        return self.read(*self._run(ids_BT, documents_BT), norms)[1]

    def hidden(self, ids_BT: Tensor, documents_BT: Tensor | None) -> Tensor:
        """Hidden states before the final norm [B,T,D]."""
        sources = self.sources(ids_BT, documents_BT)
        return self.mix(sources, self.output_attn_res_norm, self.output_attn_res_proj)

    def sources(self, ids_BT: Tensor, documents_BT: Tensor | None) -> list[Tensor]:
        """What the last depth mix reads: the embedding, then the running sum at the end of each block."""
        blocks, prefix, added = self._run(ids_BT, documents_BT)
        return [*blocks, prefix if added is None else prefix + added]

    def _run(self, ids_BT: Tensor, documents_BT: Tensor | None) -> tuple[list[Tensor], Tensor, Tensor | None]:
        """The ended blocks, and the running sum behind the last layer in two terms."""
        prefix: Tensor = self.embed_tokens(ids_BT)
        blocks: list[Tensor] = []
        added: Tensor | None = None
        for layer in self.layers:
            ended = blocks
            if layer.opens_block:
                if added is not None:
                    prefix, added = prefix + added, None
                ended = [*blocks, prefix]
            if self.recompute and self.training:
                prefix, added = checkpoint(layer, blocks, prefix, added, documents_BT, use_reentrant=False)
            else:
                prefix, added = layer(blocks, prefix, added, documents_BT)
            blocks = ended
        return blocks, prefix, added


class LossTerms(NamedTuple):
    """Sums over the counted targets of a batch."""

    text: Tensor  # cross-entropy in nats
    extra: Tensor  # what training adds to it: auxiliary loss and multi-token prediction, weighed; else 0


class KimiK3(nn.Module):
    """The whole text model: ids [B,T] -> logits [B,T,W]. With `mtp` it trains one more layer (mtp.py)."""

    def __init__(self, arch: Architecture, *, mtp: bool = False) -> None:
        super().__init__()
        self.arch = arch
        self.auxiliary_weight = 0.01
        self.model = Trunk(arch)
        self.lm_head = Projection(arch.hidden_size, arch.vocab_size, gain=0.5)
        self.head_loss = HeadLoss()
        self.mtp = NextNextLayer(arch) if mtp else None

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
        """Let TorchInductor fuse the elementwise work of every part; last of all settings. Returns self."""
        # A mix is compiled for every number of sources, with and without gradients; torch gives up at 8.
        torch._dynamo.config.recompile_limit = max(_COMPILED_FORMS, torch._dynamo.config.recompile_limit)
        fixed = (KimiDeltaAttention, GatedLatentAttention, SituMlp, DepthMix, NormedMix, RMSNorm, LatentMoe)
        for module in self.modules():
            if isinstance(module, fixed):
                module.compile(dynamic=False)
            elif isinstance(module, Router):
                # It counts, in part on the host; a graph of its mixture goes around it.
                module.forward = torch.compiler.disable(module.forward)  # type: ignore[method-assign]
        self.head_loss.softmax.compile(dynamic=True)
        return self

    def quantise_experts(self, *, weights: str, activations: str) -> KimiK3:
        """How experts are trained: weights "mxfp4" or "none", inputs of both products "mxfp8" or "none"."""
        for module in self.modules():
            if isinstance(module, ExpertBank):
                module.quantise = weight_quantiser(weights)
                module.quantise_input = activation_quantiser(activations)
        return self

    def use_kda(self, choice: KdaChoice) -> KimiK3:
        """Run the convolution and the gated delta rule of every KDA layer by `choice`."""
        for module in self.modules():
            if isinstance(module, KimiDeltaAttention):
                module.kernel, module.convolve = choice.kernel, choice.convolve
        return self

    def recompute_layers(self, recompute: bool) -> KimiK3:
        """Whether a training pass keeps only the input of each layer and runs it again going back."""
        self.model.recompute = recompute
        return self

    def balance_by(self, method: str, *, auxiliary_weight: float = 0.01) -> KimiK3:
        """What the routers count, and the weight of the auxiliary loss if that is the method."""
        for router in self.routers():
            router.balance = known_balance(method)
        self.auxiliary_weight = auxiliary_weight
        return self

    def routers(self) -> list[Router]:
        """The routers in layer order."""
        return [module for module in self.modules() if isinstance(module, Router)]

    def forward(
        self,
        ids_BT: Tensor,
        documents_BT: Tensor | None = None,
        following_BT: Tensor | None = None,
        *,
        targets_BT: Tensor | None = None,
        ignore: int = -1,
    ) -> Tensor | tuple[Tensor, Tensor] | LossTerms:
        """Logits [B,T,W]. `documents_BT` [B,T] separates documents of a row (packing.py); None: one each.

        With `following_BT`, the next token of each position, also those of the token after it (mtp.py). With
        `targets_BT`, `loss_terms` instead: sharded parameters are gathered for a call of the module.
        """
        if targets_BT is not None:
            return self._loss_terms(ids_BT, targets_BT, ignore=ignore, documents_BT=documents_BT)
        first, second = self._states(ids_BT, documents_BT, following_BT)
        return self.lm_head(first) if second is None else (self.lm_head(first), self.lm_head(second))

    def _states(
        self, ids_BT: Tensor, documents_BT: Tensor | None, following_BT: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """What the head reads [B,T,D] for the next token, and with `following_BT` for the one after it."""
        if following_BT is None:
            return self.model(ids_BT, documents_BT), None
        if self.mtp is None:
            raise RuntimeError("the model was made without its multi-token-prediction layer (mtp=True)")
        hidden = self.model.hidden(ids_BT, documents_BT)
        second = self.mtp(hidden, self.model.embed_tokens(following_BT), documents_BT)
        return self.model.norm(hidden), second

    def loss_terms(
        self, ids_BT: Tensor, targets_BT: Tensor, *, ignore: int, documents_BT: Tensor | None = None
    ) -> LossTerms:
        """Both sums of a batch; micro-batches of any sizes add up. Targets equal to `ignore` don't count."""
        terms: LossTerms = self(ids_BT, documents_BT, targets_BT=targets_BT, ignore=ignore)
        return terms

    def _loss_terms(
        self, ids_BT: Tensor, targets_BT: Tensor, *, ignore: int, documents_BT: Tensor | None
    ) -> LossTerms:
        extra = torch.zeros((), device=ids_BT.device)
        following = None
        if self.training and self.mtp is not None:
            following = torch.where(targets_BT == ignore, 0, targets_BT)
        first, second = self._states(ids_BT, documents_BT, following)
        if second is not None:
            seconds_BT = second_targets(targets_BT, documents_BT, ignore=ignore)
            extra = extra + MTP_WEIGHT * self._nats(second, seconds_BT, ignore=ignore)
        if self.training:
            counted = (targets_BT != ignore).sum()
            for auxiliary in (router.auxiliary for router in self.routers()):
                if auxiliary is not None:
                    extra = extra + self.auxiliary_weight * counted * auxiliary
        return LossTerms(self._nats(first, targets_BT, ignore=ignore), extra)

    def _nats(self, states_BTD: Tensor, targets_BT: Tensor, *, ignore: int) -> Tensor:
        head = self.lm_head
        return self.head_loss(
            states_BTD, head.weight, targets_BT, ignore=ignore, matmul_dtype=head.matmul_dtype
        )

    def loss_sum(
        self, ids_BT: Tensor, targets_BT: Tensor, *, ignore: int, documents_BT: Tensor | None = None
    ) -> Tensor:
        """What training descends, times the number of counted targets: the sum of both terms."""
        return sum(self.loss_terms(ids_BT, targets_BT, ignore=ignore, documents_BT=documents_BT))

    def loss(
        self, ids_BT: Tensor, targets_BT: Tensor, *, ignore: int, documents_BT: Tensor | None = None
    ) -> Tensor:
        """`loss_sum` per counted target: outside of training, the mean cross-entropy in nats."""
        counted = (targets_BT != ignore).sum()
        return self.loss_sum(ids_BT, targets_BT, ignore=ignore, documents_BT=documents_BT) / counted
