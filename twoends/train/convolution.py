"""KDA's short convolution: causal, one filter a channel, within a document.

Letters: B batch, T tokens, P channels.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ShortConvolution(nn.Module):
    """Depthwise causal convolution followed by SiLU; the last tap multiplies the current token."""

    def __init__(self, channels: int, taps: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, taps))

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Uniform in +-1/sqrt(taps), as a convolution of one channel."""
        bound = 1 / math.sqrt(self.weight.shape[-1])
        nn.init.uniform_(self.weight, -bound, bound, generator=generator)


def short_convolution(x: Tensor, weight: Tensor, documents_BT: Tensor | None = None) -> Tensor:
    """silu(sum_j weight[c, 0, j] x[t - taps + 1 + j, c]), x [B,T,P], weight [P,1,taps].

    Zeros stand before the row's first token, and before the first of each document.
    """
    taps, tokens = weight.shape[-1], x.shape[1]
    padded = F.pad(x, (0, 0, taps - 1, 0))
    y = x * weight[:, 0, -1]
    for back in range(1, taps):
        earlier = padded[:, taps - 1 - back : taps - 1 - back + tokens]
        if documents_BT is not None:
            same = F.pad(documents_BT[:, back:] == documents_BT[:, :-back], (min(back, tokens), 0))
            earlier = earlier * same[..., None]
        y = y + earlier * weight[:, 0, taps - 1 - back]
    return F.silu(y)
