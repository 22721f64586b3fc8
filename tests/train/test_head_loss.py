"""The loss in pieces of rows: what whole logits give, without a tensor of all logits."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the training half needs torch (pip install 'twoends[train]')")

import torch.nn.functional as F  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

import tests.train.models  # noqa: E402, F401  (one thread)
from twoends.train import head_loss  # noqa: E402
from twoends.train.head_loss import HeadLoss, head_bytes, piece_rows  # noqa: E402

WIDTH = 24
IGNORE = -1


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of 32 rows, so that a hundred rows are several."""
    monkeypatch.setattr(head_loss, "_PIECE_BYTES", 1)
    monkeypatch.setattr(head_loss, "_LEAST_ROWS", 32)


def _case(rows: int, vocab: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, a head's weight and targets; the logits have standard deviation 3."""
    generator = torch.Generator().manual_seed(rows + vocab)
    hidden = torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocab, WIDTH, generator=generator, dtype=torch.float64) * 3 / WIDTH**0.5
    targets = torch.randint(0, vocab, (rows,), generator=generator)
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets


def _in_pieces(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, matmul_dtype: torch.dtype | None = None
) -> torch.Tensor:
    nats: torch.Tensor = HeadLoss()(hidden, weight, targets, ignore=IGNORE, matmul_dtype=matmul_dtype)
    return nats


def _whole(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.linear(hidden, weight), targets, ignore_index=IGNORE, reduction="sum")


def _gradients(nats: torch.Tensor, *of: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Of a third of the loss: the incoming gradient isn't one."""
    return torch.autograd.grad(nats / 3, of)


def _distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference, relative to the largest number wanted."""
    found, wanted = found.detach().double(), wanted.detach().double()
    return float((found - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("vocab", [2, 37, 1500])
@pytest.mark.parametrize("rows", [1, 32, 33, 101])
def test_loss_and_gradients_are_those_of_whole_logits_in_binary64(rows: int, vocab: int) -> None:
    hidden, weight, targets = _case(rows, vocab, torch.float64)
    targets[2::7] = IGNORE
    found, wanted = _in_pieces(hidden, weight, targets), _whole(hidden, weight, targets)
    assert _distance(found, wanted) <= 1e-12
    pairs = zip(_gradients(found, hidden, weight), _gradients(wanted, hidden, weight), strict=True)
    assert max(_distance(*pair) for pair in pairs) <= 1e-12


@pytest.mark.parametrize(
    ("matmul_dtype", "unit"), [(torch.float32, 2.0**-24), (torch.bfloat16, 2.0**-9)], ids=["f32", "bf16"]
)
def test_a_narrower_product_costs_its_own_rounding(matmul_dtype: torch.dtype, unit: float) -> None:
    hidden, weight, targets = _case(101, 37, torch.float32)
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    found, wanted = _in_pieces(hidden, weight, targets, matmul_dtype), _whole(*exact, targets)
    # Logits reach 10, sums of 24 products of rounded numbers: each is off by some 10 units. The loss is as
    # large; a softmax is off by 10 units of itself and is rounded again, as are the sums of a gradient.
    assert found.dtype == torch.float32
    assert _distance(found, wanted) <= 10 * unit
    pairs = zip(_gradients(found, hidden, weight), _gradients(wanted, *exact), strict=True)
    assert max(_distance(*pair) for pair in pairs) <= 30 * unit


def test_the_size_of_pieces_changes_only_the_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, targets = _case(101, 37, torch.float64)
    found = []
    for rows in (1, 32, 64, 101, 4096):
        monkeypatch.setattr(head_loss, "_LEAST_ROWS", rows)
        nats = _in_pieces(hidden, weight, targets)
        found.append((nats, *_gradients(nats, hidden, weight)))
    for other in found[1:]:
        # Sums of at most 101 terms in another order, of binary64.
        assert max(_distance(a, b) for a, b in zip(other, found[0], strict=True)) <= 1e-13


def test_rows_that_do_not_count_change_no_gradient_of_the_head() -> None:
    hidden, weight, targets = _case(101, 37, torch.float64)
    targets[:64:2] = IGNORE
    rest = targets != IGNORE
    d_hidden, d_weight = _gradients(_in_pieces(hidden, weight, targets), hidden, weight)
    assert not d_hidden[~rest].any()
    wanted = _gradients(_in_pieces(hidden[rest], weight, targets[rest]), hidden, weight)
    assert _distance(d_hidden, wanted[0]) <= 1e-13
    assert _distance(d_weight, wanted[1]) <= 1e-13


def test_without_a_counted_target_loss_and_gradients_are_zero() -> None:
    hidden, weight, targets = _case(70, 37, torch.float32)
    nats = _in_pieces(hidden, weight, torch.full_like(targets, IGNORE))
    assert nats == 0
    assert not any(gradient.any() for gradient in _gradients(nats, hidden, weight))


def test_huge_logits_give_a_finite_loss() -> None:
    hidden, weight, targets = _case(40, 37, torch.float32)
    found = _in_pieces(hidden * 1e4, weight, targets)
    wanted = _whole(hidden.double() * 1e4, weight.double(), targets)
    # One rounding of each logit, and each is about as large as the loss of its row.
    assert _distance(found, wanted) <= 30 * 2.0**-24


def test_a_frozen_head_gets_no_gradient() -> None:
    hidden, weight, targets = _case(70, 37, torch.float64)
    found = _gradients(_in_pieces(hidden, weight.detach(), targets), hidden)
    assert _distance(*found, *_gradients(_whole(hidden, weight, targets), hidden)) <= 1e-12


def test_evaluation_gives_the_bits_of_training() -> None:
    hidden, weight, targets = _case(70, 37, torch.float32)
    with torch.no_grad():
        evaluated = _in_pieces(hidden, weight, targets)
    assert not evaluated.requires_grad
    assert torch.equal(evaluated, _in_pieces(hidden, weight, targets))


def test_the_loss_goes_back_once() -> None:
    hidden, weight, targets = _case(70, 37, torch.float32)
    nats = _in_pieces(hidden, weight, targets)
    torch.autograd.grad(nats, hidden, retain_graph=True)
    with pytest.raises(RuntimeError, match="only once"):
        torch.autograd.grad(nats, hidden)


class _Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation gives."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        self.numel = max([self.numel, *made])
        return out


@pytest.mark.parametrize("matmul_dtype", [None, torch.bfloat16], ids=["f32", "bf16"])
def test_no_tensor_is_larger_than_a_piece_of_logits(matmul_dtype: torch.dtype | None) -> None:
    hidden, weight, targets = _case(320, 1500, torch.float32)
    with _Largest() as whole:
        _gradients(_whole(hidden, weight, targets), hidden, weight)
    with _Largest() as pieces:
        _gradients(_in_pieces(hidden, weight, targets, matmul_dtype), hidden, weight)
    assert whole.numel == 320 * 1500
    assert pieces.numel == 32 * 1500


def test_nothing_is_kept_for_the_way_back_that_grows_with_the_vocabulary_and_the_rows() -> None:
    hidden, weight, targets = _case(320, 1500, torch.float32)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        _in_pieces(hidden, weight, targets)
    assert not kept


def test_the_stated_memory_of_the_head_grows_only_by_the_gradients_of_rows() -> None:
    cpu = torch.device("cpu")
    sizes = [head_bytes(tokens=n, vocab=1500, width=WIDTH, device=cpu) for n in (320, 640)]
    assert sizes[1] - sizes[0] == 320 * WIDTH * 4


def test_a_piece_has_rows_enough_for_its_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    cpu = torch.device("cpu")
    assert [piece_rows(vocab, cpu) for vocab in (256, 2048, 163_840)] == [8192, 1024, 256]
