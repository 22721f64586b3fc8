"""What a draft layer is trained for: the chance that a draft is kept."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the training half needs torch (pip install 'twoends[train]')")

from twoends.train import draft_loss  # noqa: E402


def noise(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_the_overlap_is_the_chance_that_a_drawn_draft_is_kept() -> None:
    logits, p = noise(3, 7, seed=1), torch.softmax(2 * noise(3, 7, seed=2), -1)
    q = torch.softmax(logits, -1)
    kept = (q * torch.minimum(torch.ones_like(p), p / q)).sum(-1)
    torch.testing.assert_close(draft_loss.overlap(logits, p), kept)
    torch.testing.assert_close(draft_loss.overlap(logits, p), 1 - 0.5 * (p - q).abs().sum(-1))
    torch.testing.assert_close(draft_loss.acceptance_loss(logits, p, torch.zeros(3)), -kept.log())


def test_the_loss_is_zero_at_the_target_and_cross_entropy_where_one_id_is_certain() -> None:
    logits, ids = noise(4, 9, seed=1), torch.tensor([0, 3, 3, 8])
    zero = draft_loss.acceptance_loss(logits, torch.softmax(logits, -1), ids)
    torch.testing.assert_close(zero, torch.zeros_like(zero))
    certain = torch.nn.functional.one_hot(ids, 9).double()
    losses = [loss(logits, certain, ids) for loss in draft_loss.LOSSES.values()]
    for other in losses[1:]:
        torch.testing.assert_close(losses[0], other)


def test_its_gradient_is_that_of_the_total_variation_over_the_overlap() -> None:
    p = torch.softmax(3 * noise(1, 12, seed=2), -1)
    logits = noise(1, 12, seed=1).requires_grad_()
    draft_loss.acceptance_loss(logits, p, torch.zeros(1)).sum().backward()
    found, logits.grad = logits.grad, None
    (1 - draft_loss.overlap(logits, p)).sum().backward()
    torch.testing.assert_close(found, logits.grad / draft_loss.overlap(logits, p).detach()[:, None])


def test_the_same_draw_is_what_the_sampler_does() -> None:
    """Counted over a fine grid of draws, ids laid out likeliest first on both sides."""
    q, p = (torch.softmax(2 * noise(1, 6, seed=seed), -1).float() for seed in (3, 4))
    draws = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000

    def drawn(x: torch.Tensor) -> torch.Tensor:
        ordered, ids = x[0].double().sort(descending=True)
        return ids[torch.searchsorted(ordered.cumsum(0), draws, right=True).clamp_max(5)]

    share = (drawn(q) == drawn(p)).double().mean()
    assert abs(float(draft_loss.same_draw(q, p)) - float(share)) < 6 / 20_000
    torch.testing.assert_close(draft_loss.same_draw(p, p), torch.ones(1))
