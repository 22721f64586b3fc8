"""Balance of the router: Quantile Balancing by histogram, and the methods it is compared with.

The bias b selects experts and never weighs them. With m tokens, k of n experts each, an expert should get
q = m k / n tokens. Token i routed by s_ij + b_j has the cutoff alpha_i, its (k+1)-th biased score; expert j
takes it when b_j > alpha_i - s_ij =: r_ij. So the bias under which exactly q tokens would choose j is the
q-th smallest r_ij, and that becomes the next step's b_j. The sign matters: r, not -r.

r is counted in 1,000 bins over [b_min - 1, b_max + 1], anew every step. Counts are integers, so they add up
to the same over any micro-batches and ranks, in any order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from twoends.errors import NotSound, OptionError

if TYPE_CHECKING:
    from twoends.train.moe import Router

BALANCES = ("none", "sign", "quantile", "auxiliary")
BINS = 1000
# Rows of scores binned at a time: the bin numbers of 4,096 tokens and 896 experts take 29 MB.
_TOKENS_AT_ONCE = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBalance:
    """One router's step: tokens per expert (int64 [E]), max violation, and the violation of pure chance."""

    load_E: Tensor
    max_violation: float
    floor: float


def known_balance(method: str) -> str:
    """`method`, or an OptionError that lists the known ones."""
    if method not in BALANCES:
        raise OptionError(f"There is no balance {method!r}; there is {', '.join(BALANCES)}.")
    return method


def max_violation(load_E: Tensor) -> float:
    """Largest load over the mean load, minus one: 0 is perfect balance."""
    load = load_E.double()
    return float(load.max() / load.mean() - 1)


def violation_floor(*, tokens: int, top_k: int, experts: int) -> float:
    """About the max violation of a router that is even but for chance: sqrt(2 ln n / q)."""
    return math.sqrt(2 * math.log(experts) * experts / (tokens * top_k))


def _bin_range(bias_E: Tensor) -> tuple[float, float]:
    """Low end and width of the bins under `bias_E`."""
    low, high = float(bias_E.min()) - 1, float(bias_E.max()) + 1
    return low, (high - low) / BINS


def margin_counts(scores_NE: Tensor, cutoff_N: Tensor, bias_E: Tensor) -> Tensor:
    """How often alpha_i - s_ij fell into each bin, int64 [E, BINS], for scores in [0, 1]."""
    low, width = _bin_range(bias_E)
    experts = scores_NE.shape[1]
    first_E = torch.arange(experts, device=scores_NE.device) * BINS
    counts = torch.zeros(experts * BINS, dtype=torch.int64, device=scores_NE.device)
    chunks = zip(scores_NE.split(_TOKENS_AT_ONCE), cutoff_N.split(_TOKENS_AT_ONCE), strict=True)
    for scores, cutoff in chunks:
        bins = ((cutoff[:, None] - scores - low) / width).nan_to_num().floor().clamp(0, BINS - 1).long()
        counts += torch.bincount((bins + first_E).flatten(), minlength=experts * BINS)
    return counts.unflatten(0, (experts, BINS))


def quantile_bias(counts_EB: Tensor, bias_E: Tensor, *, top_k: int) -> Tensor:
    """The bias that balances what `counts_EB` counted under `bias_E`; mean zero, [E] in bias's type.

    Within the bin that holds the q-th smallest margin the position is interpolated.
    """
    low, width = _bin_range(bias_E)
    experts, tokens = len(counts_EB), int(counts_EB[0].sum())
    target = tokens * top_k / experts
    reached = counts_EB.cumsum(1)
    at = (reached >= math.ceil(target)).int().argmax(1, keepdim=True)
    inside = counts_EB.gather(1, at).double()
    before = reached.gather(1, at).double() - inside
    share = ((target - before) / inside).clamp(0, 1)
    bias = (low + (at + share) * width).squeeze(1)
    return (bias - bias.mean()).to(bias_E.dtype)


def sign_bias(load_E: Tensor, bias_E: Tensor, *, rate: float) -> Tensor:
    """One sign step: b + rate * sign(mean load - load)."""
    return bias_E + rate * torch.sign(load_E.double().mean() - load_E).to(bias_E.dtype)


def auxiliary_loss(scores_NE: Tensor, load_E: Tensor, *, counted_N: Tensor | None) -> Tensor:
    """n * sum_j f_j P_j: f the share of choices (no gradient), P the mean normalised score. 1 when even."""
    shares_NE = scores_NE / scores_NE.sum(-1, keepdim=True)
    if counted_N is not None:
        shares_NE = shares_NE[counted_N]
    chosen_E = load_E / load_E.sum().clamp_min(1)
    return load_E.shape[0] * (chosen_E.to(scores_NE.dtype) * shares_NE.mean(0)).sum()


def recomputing() -> bool:
    """Whether this runs inside a backward pass, that is, repeats a forward pass that was counted before.

    torch.utils.checkpoint asks the same way; there is no public name for it.
    """
    return bool(torch._C._current_graph_task_id() != -1)


@torch.no_grad()
def rebalance(
    routers: Sequence[Router],
    *,
    method: str,
    keep: float = 0.0,
    sign_rate: float = 1e-3,
    group: dist.ProcessGroup | None = None,
) -> list[LayerBalance]:
    """Give every router its next bias from what it counted since the last call; what each had counted.

    Call once per optimiser step, after every micro-batch. The counts of all layers travel in one integer
    all-reduce over `group`. `keep` is the share of the old bias that stays (0: the report's form).
    """
    known_balance(method)
    counted = [router.take_counts() for router in routers]
    if group is not None and counted:
        flat = torch.cat([counts.flatten() for counts in counted])
        dist.all_reduce(flat, group=group)
        pieces = flat.split([counts.numel() for counts in counted])
        counted = [piece.view_as(counts) for piece, counts in zip(pieces, counted, strict=True)]
    result = []
    for number, (router, counts) in enumerate(zip(routers, counted, strict=True)):
        load_E, bad_tokens, histogram_EB = counts[:, 0], int(counts[0, 1]), counts[:, 2:]
        if bad_tokens:
            raise NotSound(f"Router {number} saw {bad_tokens} tokens whose scores are not finite.")
        tokens = int(load_E.sum()) // router.top_k
        if not tokens:
            raise RuntimeError("rebalance needs a training forward pass before it")
        bias = router.e_score_correction_bias
        if method == "quantile":
            wanted = quantile_bias(histogram_EB, bias, top_k=router.top_k)
            bias.mul_(keep).add_(wanted, alpha=1 - keep)
        elif method == "sign":
            bias.copy_(sign_bias(load_E, bias, rate=sign_rate))
        floor = violation_floor(tokens=tokens, top_k=router.top_k, experts=len(load_E))
        result.append(LayerBalance(load_E=load_E, max_violation=max_violation(load_E), floor=floor))
    return result
