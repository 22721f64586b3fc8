"""What a draft is trained for, and how often it is right.

A drafted id v is drawn from q and kept with probability min(1, p_v / q_v), p being the target's distribution
(speculative sampling; Leviathan et al. 2023). The chance that a draft is kept is therefore

    alpha = sum_v q_v min(1, p_v / q_v) = sum_v min(p_v, q_v) = 1 - TV(p, q).

`acceptance` is -log alpha (the LK loss in its likelihood form, arXiv 2602.23881; p and q at temperature 1).
Why the logarithm: the gradient of 1 - alpha is that of the total variation, which is tiny where q and p
hardly overlap, as they do at the start; -log alpha has the same one divided by alpha, so it pulls there, and
it needs no number to be chosen, as a mixture with KL does. Where p has one outcome it is cross-entropy. KL
has the same optimum, q = p, which one small layer does not reach; short of it KL spends the layer on mass
that the overlap doesn't ask for. Tokens of a step count alike, and so do the unrolled steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# No overlap is so small that its logarithm is lost; a softmax in binary32 over any vocabulary stays above.
_LEAST_OVERLAP = 1e-20

# (logits [N,W] of the draft, the target's probabilities [N,W], the text's own tokens [N]) -> loss [N]
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def overlap(logits_NW: Tensor, p_NW: Tensor) -> Tensor:
    """alpha [N]: the chance that speculative sampling keeps a draft."""
    return torch.minimum(torch.softmax(logits_NW, -1), p_NW).sum(-1)


def acceptance_loss(logits_NW: Tensor, p_NW: Tensor, text_N: Tensor) -> Tensor:
    """-log alpha [N], in nats."""
    return -torch.log(overlap(logits_NW, p_NW).clamp_min(_LEAST_OVERLAP))


def cross_entropy_loss(logits_NW: Tensor, p_NW: Tensor, text_N: Tensor) -> Tensor:
    """-log q of the token that the text has [N]: the loss of multi-token prediction (mtp.py)."""
    return F.cross_entropy(logits_NW, text_N, reduction="none")


def kl_loss(logits_NW: Tensor, p_NW: Tensor, text_N: Tensor) -> Tensor:
    """KL(p, q) [N] but for the entropy of p, which no draft changes."""
    return -(p_NW * torch.log_softmax(logits_NW, -1)).sum(-1)


LOSSES: dict[str, Loss] = {
    "acceptance": acceptance_loss,
    "cross-entropy": cross_entropy_loss,
    "kl": kl_loss,
}


class Rates(NamedTuple):
    """How often a draft is kept, by how it is verified; [N] each."""

    overlap: Tensor  # speculative sampling at temperature 1: alpha
    same_draw: Tensor  # the engine at temperature 1: both draw with the same number (generate/sampler.py)
    greedy: Tensor  # both take the likeliest


def rates(q_NW: Tensor, p_NW: Tensor) -> Rates:
    """The three rates of a draft distribution `q_NW`, which may be a certain guess."""
    return Rates(
        overlap=torch.minimum(q_NW, p_NW).sum(-1),
        same_draw=same_draw(q_NW, p_NW),
        greedy=(q_NW.argmax(-1) == p_NW.argmax(-1)).float(),
    )


def same_draw(q_NW: Tensor, p_NW: Tensor) -> Tensor:
    """The chance that one number picks the same id from q and from p, each laid out likeliest first."""
    q_begin, p_begin = _begins(q_NW), _begins(p_NW)
    ends = torch.minimum(q_begin + q_NW.double(), p_begin + p_NW.double())
    return (ends - torch.maximum(q_begin, p_begin)).clamp_min(0).sum(-1).float()


def _begins(p_NW: Tensor) -> Tensor:
    """Where each id's part of [0, 1) begins, in binary64."""
    ordered, ids = torch.sort(p_NW, dim=-1, descending=True, stable=True)
    ordered = ordered.double()
    return torch.empty_like(ordered).scatter_(-1, ids, ordered.cumsum(-1) - ordered)
