"""Attention Residuals, block form: softmax over depth instead of a running sum (spec section 6)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from twoends.train.layers import RMSNorm


class DepthQuery(nn.Module):
    """The learned pseudo-query of a depth mix, [1, D]. Zero at the start: the mix begins as a plain mean."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, width))


def depth_mix(sources: list[Tensor], norm: RMSNorm, query: DepthQuery) -> Tensor:
    """sum_i softmax_i(f . v_i / rms(v_i)) v_i over sources v_i [B,T,D]: keys normalised, values raw.

    f is norm weight times pseudo-query. Of one source the mix is that source, whatever the query.
    """
    if len(sources) == 1:
        return sources[0]
    folded = norm.weight * query.weight[0]
    scores = [(v * folded).sum(-1) * (v.square().mean(-1) + norm.eps).rsqrt() for v in sources]
    weights = torch.softmax(torch.stack(scores, -1), -1)
    mixed = sources[0] * weights[..., 0:1]
    for i, v in enumerate(sources[1:], 1):
        mixed = mixed + v * weights[..., i : i + 1]
    return mixed


class DepthMix(nn.Module):
    """`depth_mix` as a part to compile. It owns no parameter; a layer passes those it mixes with."""

    def forward(self, sources: list[Tensor], norm: RMSNorm, query: DepthQuery) -> Tensor:
        return depth_mix(sources, norm, query)


class NormedMix(nn.Module):
    """What a sub-layer reads, in one pass: the running sum goes on, joins the mix, the mix is normalised."""

    def forward(
        self,
        blocks: list[Tensor],
        prefix: Tensor,
        added: Tensor | None,
        norms: tuple[RMSNorm, DepthQuery, RMSNorm],
    ) -> tuple[Tensor, Tensor]:
        """prefix + added, and the normalised mix of `blocks` and that sum; all [B,T,D].

        `norms` are the mix's norm and query, then the norm behind it. `added` may be of a narrower type.
        """
        if added is not None:
            prefix = prefix + added.to(prefix.dtype)
        mix_norm, query, norm = norms
        return prefix, norm(depth_mix([*blocks, prefix], mix_norm, query))
