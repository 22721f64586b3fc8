"""QK-clip: heads of MLA whose logits grew past a threshold get their query and key weights shrunk.

After a step, a head with largest logit S > threshold has gamma = threshold / S: its own query and key rows
are multiplied by sqrt(gamma), the query rows that meet the shared key by gamma, since that key belongs to all
heads and stays. KDA needs none of this: its queries and keys have unit length.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from twoends.train.mla import GatedLatentAttention

QK_THRESHOLD = 100.0


@torch.no_grad()
def clip_attention(
    model: nn.Module, *, threshold: float = QK_THRESHOLD, group: dist.ProcessGroup | None = None
) -> float:
    """Shrink what exceeds `threshold`, forget the record, and return the step's largest logit.

    Call after the optimiser's step. Over the ranks of `group` the largest logit counts. Minus infinity if
    there is no MLA layer or no training pass came before.
    """
    layers = [module for module in model.modules() if isinstance(module, GatedLatentAttention)]
    if not layers:
        return float("-inf")
    largest_LH = torch.stack([layer.logit_max_H for layer in layers])
    if group is not None:
        dist.all_reduce(largest_LH, op=dist.ReduceOp.MAX, group=group)
    for layer, largest_H in zip(layers, largest_LH, strict=True):
        layer.forget_logits()
        if bool((largest_H > threshold).any()):
            _shrink(layer, torch.clamp(threshold / largest_H.clamp_min(threshold), max=1.0))
    return float(largest_LH.max())


def _shrink(layer: GatedLatentAttention, gamma_H: Tensor) -> None:
    root, ones = gamma_H.sqrt()[:, None], torch.ones_like(gamma_H)[:, None]
    q_rows = torch.cat([root.expand(-1, layer.nope), gamma_H[:, None].expand(-1, layer.rope)], 1)
    kv_rows = torch.cat([root.expand(-1, layer.nope), ones.expand(-1, layer.value)], 1)
    _scale_rows(layer.q_b_proj.weight, q_rows.flatten())
    _scale_rows(layer.kv_b_proj.weight, kv_rows.flatten())


def _scale_rows(weight: Tensor, factor_R: Tensor) -> None:
    factor = factor_R[:, None].to(weight.dtype)
    if isinstance(weight, DTensor):
        everywhere = [Replicate()] * weight.device_mesh.ndim
        factor = DTensor.from_local(factor.expand(weight.shape).contiguous(), weight.device_mesh, everywhere)
        factor = factor.redistribute(placements=weight.placements)
    weight.mul_(factor)
