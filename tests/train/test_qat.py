"""Fake quantisation: what the trainer multiplies is what the checkpoint stores."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the training half needs torch (pip install 'twoends[train]')")

from twoends.checkpoint import mxfp4  # noqa: E402
from twoends.train.qat import FakeQuantise, block_exponents  # noqa: E402


def _weights(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(48, 96, generator=generator) * torch.logspace(-30, 30, 48)[:, None]
    rows[3] = 0
    rows[4, ::2] = -0.0
    rows[5] = torch.tensor([0.25, -0.75, 1.25, 6.0]).repeat(24)
    return rows


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_forward_pass_sees_what_the_checkpoint_codec_stores(seed: int) -> None:
    weights = _weights(seed)
    stored = mxfp4.decode(*mxfp4.encode(weights.numpy()))
    np.testing.assert_array_equal(FakeQuantise()(weights).numpy(), stored)


def test_the_gradient_passes_straight_through() -> None:
    weights = _weights(6).requires_grad_()
    pull = torch.randn(48, 96)
    (FakeQuantise()(weights) * pull).sum().backward()
    assert torch.equal(weights.grad, pull)


def test_quantising_twice_changes_no_value() -> None:
    once = FakeQuantise()(_weights(7))
    assert torch.equal(FakeQuantise()(once), once)


@pytest.mark.parametrize(
    ("amax", "exponent"), [(6.0, 0), (6.0001, 1), (3.0, -1), (3.0001, 0), (4.0, 0), (1.0, -2)]
)
def test_the_scale_is_the_least_power_that_saturates_nothing(amax: float, exponent: int) -> None:
    block = torch.zeros(1, 32)
    block[0, 7] = -amax
    assert block_exponents(block).item() == exponent


def test_ties_go_to_the_even_code() -> None:
    block = torch.zeros(1, 32)
    block[0, :8] = torch.tensor([6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert FakeQuantise()(block)[0, :8].tolist() == [6.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]


def test_a_width_that_is_no_multiple_of_32_is_refused() -> None:
    with pytest.raises(ValueError, match=r"blocks are 32 wide.*\(4, 40\)"):
        FakeQuantise()(torch.zeros(4, 40))
