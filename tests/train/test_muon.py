"""Muon: heads of equal say, stacks of experts, and the size of an update."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the training half needs torch (pip install 'twoends[train]')")

from twoends.train.muon import apply_updates, blocks_of, orthogonalise  # noqa: E402


def _gradient(heads: int, rows: int, columns: int) -> torch.Tensor:
    """Heads whose gradients grow from 1 to 1,000 times in size."""
    generator = torch.Generator().manual_seed(4)
    noise = torch.randn(heads, rows, columns, generator=generator)
    return (noise * torch.logspace(-6, -3, heads)[:, None, None]).flatten(0, 1)


DTYPES = pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["binary32", "bf16"])


def _rms_by_head(
    gradient: torch.Tensor, *, heads: int, head_rows: tuple[int, ...], dtype: torch.dtype | None = None
) -> torch.Tensor:
    weight = torch.zeros_like(gradient)
    apply_updates([(weight, gradient)], head_rows=head_rows, learning_rate=1.0, matmul_dtype=dtype)
    return weight.unflatten(0, (heads, -1)).square().mean((1, 2)).sqrt()


@DTYPES
@pytest.mark.parametrize(("rows", "columns"), [(128, 1024), (32, 128), (16, 32), (8, 32), (128, 128)])
def test_heads_whose_gradients_differ_a_thousand_times_are_updated_alike(
    rows: int, columns: int, dtype: torch.dtype | None
) -> None:
    rms = _rms_by_head(_gradient(8, rows, columns), heads=8, head_rows=(rows,), dtype=dtype)
    assert float(rms.max() / rms.min()) < 1.02
    assert float(rms.mean()) == pytest.approx(0.2, rel=0.05)


def test_the_whole_matrix_gives_small_heads_little() -> None:
    rms = _rms_by_head(_gradient(8, 128, 1024), heads=8, head_rows=())
    assert float(rms.max() / rms.min()) > 5


def test_the_scale_follows_the_shape_of_one_head() -> None:
    gradient = torch.randn(96, 32, generator=torch.Generator().manual_seed(1))
    weight = torch.zeros_like(gradient)
    apply_updates([(weight, gradient)], head_rows=(8,), learning_rate=1.0)
    wanted = torch.cat([-0.2 * 32**0.5 * orthogonalise(head[None])[0] for head in gradient.split(8)])
    torch.testing.assert_close(weight, wanted, rtol=1e-5, atol=1e-6)


def test_keys_and_values_of_a_head_are_made_orthogonal_apart() -> None:
    matrix = torch.arange(2 * (3 + 5) * 4.0).view(16, 4)
    keys, values = blocks_of(matrix, (3, 5))
    assert torch.equal(keys[1], matrix[8:11])
    assert torch.equal(values[0], matrix[3:8])


def test_an_expert_of_a_stack_is_updated_as_if_it_were_alone() -> None:
    gradient = torch.randn(6, 24, 40, generator=torch.Generator().manual_seed(2))
    stacked, alone = torch.zeros_like(gradient), torch.zeros_like(gradient)
    apply_updates([(stacked, gradient)], head_rows=(), learning_rate=0.1)
    for expert in range(6):
        apply_updates([(alone[expert], gradient[expert])], head_rows=(), learning_rate=0.1)
    torch.testing.assert_close(stacked, alone, rtol=1e-5, atol=1e-6)


@DTYPES
@pytest.mark.parametrize("shape", [(1, 16, 64), (3, 64, 16), (2, 32, 32)])
def test_singular_values_come_close_to_one(shape: tuple[int, ...], dtype: torch.dtype | None) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    values = torch.linalg.svdvals(orthogonalise(x * 1e-12, matmul_dtype=dtype))
    # The smallest of a square matrix may be near zero, and lag behind.
    assert float(values.max()) < 1.01
    assert float(values.median()) > 0.95


def test_a_gradient_of_zeros_moves_nothing() -> None:
    assert not orthogonalise(torch.zeros(2, 4, 6)).any()
