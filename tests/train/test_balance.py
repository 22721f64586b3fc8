"""Quantile balancing: the sign, the mean, and how fast a skewed router becomes even."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the training half needs torch (pip install 'twoends[train]')")

from twoends.train.balance import balanced_bias, max_violation  # noqa: E402


def _skewed_scores(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.sigmoid(torch.randn(4096, 24, generator=generator) + torch.linspace(-2, 2, 24))


def _violation(scores: torch.Tensor, bias: torch.Tensor) -> float:
    chosen = torch.topk(scores + bias, 4, dim=-1).indices
    return max_violation(torch.bincount(chosen.flatten(), minlength=24))


def test_three_steps_on_fresh_tokens_balance_a_skewed_router() -> None:
    bias = torch.zeros(24)
    assert _violation(_skewed_scores(0), bias) > 2
    for step in range(3):
        bias = balanced_bias(_skewed_scores(step), bias, top_k=4)
    # The floor of chance alone is sqrt(2 ln 24 / 683) = .10.
    assert _violation(_skewed_scores(9), bias) < 0.2


def test_the_opposite_sign_makes_it_worse() -> None:
    scores, bias = _skewed_scores(0), torch.zeros(24)
    wrong = -balanced_bias(scores, bias, top_k=4)
    assert _violation(scores, wrong) > _violation(scores, bias)


def test_the_busiest_expert_is_pushed_down_most() -> None:
    bias = balanced_bias(_skewed_scores(1), torch.zeros(24), top_k=4)
    assert bias.argmin() == 23


def test_the_bias_has_mean_zero() -> None:
    bias = balanced_bias(_skewed_scores(2), torch.linspace(0, 1, 24), top_k=4)
    assert abs(float(bias.mean())) < 1e-6


@pytest.mark.parametrize(("load", "violation"), [([4, 4, 4, 4], 0.0), ([16, 0, 0, 0], 3.0)])
def test_violation_is_the_largest_load_over_the_mean_minus_one(load: list[int], violation: float) -> None:
    assert max_violation(torch.tensor(load)) == violation
