"""Quantile Balancing: the router bias that would have spread the last batch evenly.

b selects experts and never weighs them. With m tokens, k of n experts each, an expert should get
q = m k / n tokens. The new bias of expert j is minus the (q+1)-th largest margin s_ij - alpha_i over
tokens, where alpha_i is the (k+1)-th biased score of token i. Note the minus: routing adds b, so an expert
with large margins must be pushed down. The batch that made a bias is never routed with it.
"""

from __future__ import annotations

import torch
from torch import Tensor


def balanced_bias(scores_NE: Tensor, bias_E: Tensor, *, top_k: int) -> Tensor:
    """The next bias from one step's router scores [tokens, experts] and the bias that routed them.

    Mean zero, so that the bias can't drift. Exact quantile, not a histogram: one process, one batch a step.
    """
    tokens, experts = scores_NE.shape
    cutoff = torch.topk(scores_NE + bias_E, top_k + 1, dim=-1).values[:, -1:]
    margins_EN = (scores_NE - cutoff).T.contiguous()
    rank = min(tokens, tokens * top_k // experts + 1)
    bias = -torch.topk(margins_EN, rank, dim=-1).values[:, -1]
    return bias - bias.mean()


def max_violation(load_E: Tensor) -> float:
    """Largest load over the mean load, minus one: 0 is perfect balance."""
    load = load_E.float()
    return float(load.max() / load.mean() - 1)
