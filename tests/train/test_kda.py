"""KDA: the tile form against the recurrence that defines it."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the training half needs torch (pip install 'twoends[train]')")

from twoends.train.kda import l2_normalise, recurrent_kda, short_convolution, tiled_kda  # noqa: E402


def _inputs(tokens: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    q, k, g = (torch.randn(2, tokens, 3, 8, dtype=dtype, generator=generator) for _ in range(3))
    v = torch.randn(2, tokens, 3, 5, dtype=dtype, generator=generator)
    beta = torch.rand(2, tokens, 3, dtype=dtype, generator=generator)
    inputs = [l2_normalise(q), l2_normalise(k), v, -5 * torch.sigmoid(g), beta]
    return [x.requires_grad_() for x in inputs]


@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17, 33, 50])
def test_tiles_give_the_outputs_of_the_recurrence(tokens: int) -> None:
    inputs = _inputs(tokens)
    # Binary64, about fifty sums of terms near one.
    torch.testing.assert_close(tiled_kda(*inputs), recurrent_kda(*inputs), rtol=0, atol=1e-13)


@pytest.mark.parametrize("tokens", [1, 16, 37])
def test_tiles_give_the_gradients_of_the_recurrence(tokens: int) -> None:
    inputs = _inputs(tokens)
    tiled, recurrent = (
        torch.autograd.grad(kda(*inputs).square().sum(), inputs) for kda in (tiled_kda, recurrent_kda)
    )
    for found, wanted in zip(tiled, recurrent, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("gate", [-5.0, -1e-6])
def test_gates_at_their_bounds_stay_finite_in_binary32(gate: float) -> None:
    q, k, v, g, beta = _inputs(64, torch.float32)
    g = torch.full_like(g, gate).requires_grad_()
    out = tiled_kda(q, k, v, g, beta)
    grads = torch.autograd.grad(out.square().sum(), (q, k, v, g, beta))
    assert all(x.isfinite().all() for x in (out, *grads))


def test_identical_keys_do_not_blow_up_the_tile() -> None:
    q, _, v, g, _ = _inputs(32, torch.float32)
    k = torch.zeros_like(q)
    k[..., 0] = 1
    g, beta = torch.zeros_like(g), torch.full(q.shape[:3], 0.9)
    double = [x.double() for x in (q, k, v, g, beta)]
    # A power series of the coupling would lose 4 digits here; block substitution keeps binary32's seven.
    torch.testing.assert_close(
        tiled_kda(q, k, v, g, beta).double(), recurrent_kda(*double), rtol=0, atol=2e-5
    )


def test_outputs_of_a_prefix_have_the_same_bits_whatever_follows() -> None:
    inputs = [x.detach().float() for x in _inputs(48)]
    changed = [x.clone() for x in inputs]
    for x in changed:
        x[:, 20:] = x[:, 20:].flip(0) * 0.5
    assert torch.equal(tiled_kda(*inputs)[:, :20], tiled_kda(*changed)[:, :20])


def test_a_full_correction_without_decay_overwrites_the_old_value() -> None:
    key = torch.zeros(1, 2, 1, 4, dtype=torch.float64)
    key[..., 2] = 1
    value = torch.tensor([[[[1.0, 2.0]], [[-3.0, 5.0]]]], dtype=torch.float64)
    out = tiled_kda(key, key, value, torch.zeros_like(key), torch.ones(1, 2, 1, dtype=torch.float64))
    assert torch.equal(out, value)


def test_the_last_tap_of_the_convolution_multiplies_the_current_token() -> None:
    x = torch.arange(1.0, 7.0).view(1, 6, 1)
    weight = torch.tensor([[[0.0, 0.0, 0.0, 1.0]]])
    assert torch.equal(short_convolution(x, weight), torch.nn.functional.silu(x))


def test_the_convolution_sees_zeros_before_the_first_token() -> None:
    x = torch.arange(1.0, 7.0).view(1, 6, 1)
    out = short_convolution(x, torch.tensor([[[1.0, 0.0, 0.0, 0.0]]]))
    shifted = torch.tensor([0.0, 0, 0, 1, 2, 3]).view(1, 6, 1)
    assert torch.equal(out, torch.nn.functional.silu(shifted))
