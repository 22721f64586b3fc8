"""Balance: the sign, the quantile, counts that add up, and how fast a skewed router becomes even."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch", reason="the training half needs torch (pip install 'twoends[train]')")

from tests.train.models import tiny_architecture  # noqa: E402
from twoends.errors import NotSound, OptionError  # noqa: E402
from twoends.train.balance import (  # noqa: E402
    BINS,
    auxiliary_loss,
    margin_counts,
    max_violation,
    quantile_bias,
    rebalance,
    sign_bias,
    violation_floor,
)
from twoends.train.model import KimiK3  # noqa: E402
from twoends.train.moe import Router  # noqa: E402


def _scores(step: int, *, tokens: int, experts: int, skew: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    slope = torch.linspace(-skew, skew, experts)
    return torch.sigmoid(torch.randn(tokens, experts, generator=generator) + slope)


def _load(scores: torch.Tensor, bias: torch.Tensor, *, top_k: int) -> torch.Tensor:
    chosen = torch.topk(scores + bias, top_k, dim=-1).indices
    return torch.bincount(chosen.flatten(), minlength=scores.shape[1])


def _counts(scores: torch.Tensor, bias: torch.Tensor, *, top_k: int) -> torch.Tensor:
    cutoff = torch.topk(scores + bias, top_k + 1, dim=-1).values[:, -1]
    return margin_counts(scores, cutoff, bias)


def _quantile_step(scores: torch.Tensor, bias: torch.Tensor, *, top_k: int) -> torch.Tensor:
    return quantile_bias(_counts(scores, bias, top_k=top_k), bias, top_k=top_k)


def _big_scores(step: int, *, tokens: int) -> torch.Tensor:
    """896 experts whose logits differ by a unit Gaussian: unbalanced, the busiest gets 34 times its share."""
    offset = torch.randn(896, generator=torch.Generator().manual_seed(77))
    noise = torch.randn(tokens, 896, generator=torch.Generator().manual_seed(step))
    return torch.sigmoid(noise + offset)


def test_five_quantile_steps_even_out_896_experts() -> None:
    bias = torch.zeros(896)
    before = max_violation(_load(_big_scores(0, tokens=8192), bias, top_k=16))
    for step in range(5):
        bias = _quantile_step(_big_scores(step, tokens=8192), bias, top_k=16)
    assert before > 20
    assert max_violation(_load(_big_scores(99, tokens=8192), bias, top_k=16)) < 0.5


def test_sixty_sign_steps_leave_896_experts_skewed() -> None:
    bias, scores = torch.zeros(896), _big_scores(0, tokens=2048)
    for _ in range(60):
        bias = sign_bias(_load(scores, bias, top_k=16), bias, rate=1e-3)
    assert max_violation(_load(_big_scores(99, tokens=8192), bias, top_k=16)) > 20


def test_the_opposite_sign_makes_it_worse() -> None:
    scores, bias = _scores(0, tokens=4096, experts=24, skew=2), torch.zeros(24)
    right = _quantile_step(scores, bias, top_k=4)
    before, after = (max_violation(_load(scores, b, top_k=4)) for b in (bias, right))
    assert after < before < max_violation(_load(scores, -right, top_k=4))


def test_the_histogram_is_within_one_bin_of_the_exact_quantile() -> None:
    scores, bias = _scores(3, tokens=4096, experts=24, skew=1), torch.linspace(-0.2, 0.3, 24)
    cutoff = torch.topk(scores + bias, 5, dim=-1).values[:, -1:]
    rank = math.ceil(4096 * 4 / 24)
    exact = torch.kthvalue(cutoff - scores, rank, dim=0).values
    width = 2.5 / BINS
    # Centring moves all by the mean of the errors, hence two widths.
    found = _quantile_step(scores, bias, top_k=4)
    torch.testing.assert_close(found, exact - exact.mean(), rtol=0, atol=2 * width)


@pytest.mark.parametrize("sizes", [[4096], [1, 4095], [1000, 96, 3000], [512] * 8])
def test_counts_are_the_same_for_any_split_of_the_batch(sizes: list[int]) -> None:
    scores, bias = _scores(5, tokens=4096, experts=24, skew=1), torch.linspace(-0.1, 0.2, 24)
    parts = [_counts(part, bias, top_k=4) for part in scores.split(sizes)]
    assert torch.equal(torch.stack(parts).sum(0), _counts(scores, bias, top_k=4))


def test_every_margin_is_counted_once_whatever_the_bias() -> None:
    scores, bias = _scores(5, tokens=300, experts=24, skew=9), torch.linspace(-3, 4, 24)
    assert _counts(scores, bias, top_k=4).sum(1).tolist() == [300] * 24


def test_the_bias_has_mean_zero() -> None:
    scores = _scores(2, tokens=4096, experts=24, skew=2)
    bias = _quantile_step(scores, torch.linspace(0, 1, 24), top_k=4)
    assert abs(float(bias.mean())) < 1e-6


@pytest.mark.parametrize(("load", "violation"), [([4, 4, 4, 4], 0.0), ([16, 0, 0, 0], 3.0)])
def test_violation_is_the_largest_load_over_the_mean_minus_one(load: list[int], violation: float) -> None:
    assert max_violation(torch.tensor(load)) == violation


def test_the_floor_is_about_the_violation_of_chance() -> None:
    load = torch.bincount(
        torch.randint(0, 896, (16384 * 16,), generator=torch.Generator().manual_seed(1)), minlength=896
    )
    assert max_violation(load) == pytest.approx(
        violation_floor(tokens=16384, top_k=16, experts=896), rel=0.15
    )


def test_the_auxiliary_loss_is_one_for_an_even_router_and_more_for_a_skewed_one() -> None:
    even = torch.full((32, 8), 0.5)
    assert float(auxiliary_loss(even, torch.full((8,), 4), counted_N=None)) == pytest.approx(1)
    skewed = _scores(1, tokens=32, experts=8, skew=4)
    assert float(auxiliary_loss(skewed, _load(skewed, torch.zeros(8), top_k=2), counted_N=None)) > 1.3


def _router() -> Router:
    router = Router(tiny_architecture()).train()
    router.reset_parameters(torch.Generator().manual_seed(1))
    return router


def _tokens(count: int) -> torch.Tensor:
    return torch.randn(count, 32, generator=torch.Generator().manual_seed(count)) + 0.5


def test_the_bias_made_from_a_batch_never_routed_it() -> None:
    router, x = _router(), _tokens(200)
    before, _ = router(x)
    assert not router.e_score_correction_bias.any()
    rebalance([router], method="quantile")
    after, _ = router(x)
    assert router.e_score_correction_bias.any()
    assert not torch.equal(before, after)


def test_padding_is_not_counted() -> None:
    padded, short = _router(), _router()
    x = _tokens(100)
    text = torch.arange(100) < 60
    padded(x, text)
    short(x[:60])
    assert torch.equal(padded.take_counts(), short.take_counts())


def test_a_pass_repeated_by_checkpointing_is_not_counted_again() -> None:
    once, twice = _router(), _router()
    x = _tokens(50).requires_grad_()
    once(x)[1].sum().backward()
    weights = torch.utils.checkpoint.checkpoint(lambda y: twice(y)[1].square(), x, use_reentrant=False)
    weights.sum().backward()
    assert torch.equal(once.take_counts(), twice.take_counts())


def test_micro_batches_balance_as_their_union_does() -> None:
    whole, split = _router(), _router()
    x = _tokens(384)
    whole(x)
    for part in x.split(128):
        split(part)
    reports = [rebalance([router], method="quantile")[0] for router in (whole, split)]
    assert torch.equal(reports[0].load_E, reports[1].load_E)
    assert torch.equal(whole.e_score_correction_bias, split.e_score_correction_bias)


def test_the_kept_share_of_the_old_bias_stays() -> None:
    moved, kept = _router(), _router()
    for router, keep in ((moved, 0.0), (kept, 0.75)):
        router.e_score_correction_bias.copy_(torch.linspace(-0.1, 0.1, 6))
        router(_tokens(300))
        rebalance([router], method="quantile", keep=keep)
    wanted = 0.75 * torch.linspace(-0.1, 0.1, 6) + 0.25 * moved.e_score_correction_bias
    torch.testing.assert_close(kept.e_score_correction_bias, wanted)


@pytest.mark.parametrize("method", ["none", "auxiliary"])
def test_methods_without_a_bias_leave_it_alone_and_tell_the_load(method: str) -> None:
    router = _router()
    router.balance = method
    router(_tokens(90))
    report = rebalance([router], method=method)[0]
    assert not router.e_score_correction_bias.any()
    assert int(report.load_E.sum()) == 180


def test_a_score_that_is_not_finite_is_refused() -> None:
    router, x = _router(), _tokens(9)
    x[4] = torch.nan
    chosen, _ = router(x)
    assert len(set(chosen[4].tolist())) == 2
    with pytest.raises(NotSound, match="saw 1 tokens"):
        rebalance([router], method="quantile")


def test_the_auxiliary_loss_reaches_the_router_also_under_checkpointing() -> None:
    ids = torch.arange(40).view(2, 20) * 11 % 600
    grads = []
    for recompute in (False, True):
        model = KimiK3(tiny_architecture()).initialise(3).train().recompute_layers(recompute)
        model.balance_by("auxiliary", auxiliary_weight=1.0)
        model.loss(ids[:, :-1], ids[:, 1:], ignore=-1).backward()
        grads.append(model.routers()[0].weight.grad)
    model.balance_by("none")
    plain = KimiK3(tiny_architecture()).initialise(3).train().balance_by("none")
    plain.loss(ids[:, :-1], ids[:, 1:], ignore=-1).backward()
    torch.testing.assert_close(grads[0], grads[1])
    assert not torch.allclose(grads[0], plain.routers()[0].weight.grad)


def test_an_unknown_balance_is_refused_with_the_known_ones() -> None:
    with pytest.raises(OptionError, match="no balance 'even'; there is none, sign, quantile, auxiliary"):
        KimiK3(tiny_architecture()).balance_by("even")
