"""Attention in blocks against the formula it stands for: outputs, gradients, largest logits, memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the training half needs torch (pip install 'twoends[train]')")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from twoends.train import attention  # noqa: E402
from twoends.train.attention import attend, fused_attention, largest_logits  # noqa: E402
from twoends.train.packing import documents_of_lengths  # noqa: E402

LENGTHS = (1, 2, 63, 64, 65, 200)
PACKINGS = ("rows", "packed", "one per token")
SCALE = 12**-0.5
# The compiler uses what torch itself deprecates, and looks for the gradient of an inner result.
_TORCH_WARNS = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute")


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of 200 have four blocks, the last of 8; so have the masks of the fused kernels."""
    monkeypatch.setattr(attention, "ROWS", 64)
    monkeypatch.setattr(attention, "MASK_ROWS", 64)


def _documents(packing: str, tokens: int) -> torch.Tensor | None:
    """Two rows cut at other places, one of them with padding at its end."""
    if packing == "rows":
        return None
    if packing == "one per token":
        return torch.arange(tokens).expand(2, -1)
    cuts = [torch.tensor([0, tokens // 3, tokens // 2, tokens]), torch.tensor([0, tokens - tokens // 5])]
    return torch.cat([documents_of_lengths(cut, tokens=tokens) for cut in cuts])


def _inputs(tokens: int, dtype: torch.dtype = torch.float64, *, size: float = 1.0) -> list[torch.Tensor]:
    """Queries, keys [2,3,T,12] and values [2,3,T,16]; `size` makes logits as much larger."""
    generator = torch.Generator().manual_seed(tokens)
    shapes = [(2, 3, tokens, width) for width in (12, 12, 16)]
    q, k, v = (torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes)
    # What both sides read is the same number in every type.
    return [x.bfloat16().to(dtype).requires_grad_() for x in (q * size, k, v)]


def _logits(q: torch.Tensor, k: torch.Tensor, documents: torch.Tensor | None) -> torch.Tensor:
    seen = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
    if documents is not None:
        seen = seen & (documents[:, :, None] == documents[:, None])[:, None]
    return (q @ k.mT * SCALE).masked_fill(~seen, float("-inf"))


def _formula(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: torch.Tensor | None
) -> torch.Tensor:
    return torch.softmax(_logits(q, k, documents), -1) @ v


def _blocks(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: torch.Tensor | None) -> Any:
    return attend(q, k, v, documents, scale=SCALE, watch=False)[0]


def _outputs_and_gradients(
    way: Callable[..., torch.Tensor], inputs: list[torch.Tensor], documents: torch.Tensor | None
) -> list[torch.Tensor]:
    out = way(*inputs, documents)
    pull = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    return [out, *torch.autograd.grad(out, inputs, pull.bfloat16().to(out.dtype))]


def _error(found: torch.Tensor, wanted: torch.Tensor, *, unit: float = 1.0) -> float:
    """Largest difference in units of the largest wanted number, or of `unit` (gradients may be zero)."""
    found, wanted = found.detach(), wanted.detach()
    return float((found - wanted).abs().max() / wanted.abs().max().clamp_min(unit))


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize(
    "way", [_blocks, lambda *x: fused_attention(*x, scale=SCALE)], ids=["blocks", "fused"]
)
def test_outputs_and_gradients_are_the_formulas_in_binary64(
    way: Callable[..., torch.Tensor], tokens: int, packing: str
) -> None:
    documents = _documents(packing, tokens)
    found = _outputs_and_gradients(way, _inputs(tokens), documents)
    wanted = _outputs_and_gradients(_formula, _inputs(tokens), documents)
    for name, ours, theirs in zip(("out", "q", "k", "v"), found, wanted, strict=True):
        assert ours.dtype == torch.float64
        assert _error(ours, theirs) <= 1e-12, name


@pytest.mark.parametrize(
    ("dtype", "size", "bound"),
    [
        # 2^-24 per rounding; logits reach 4, a gradient adds up 200 terms: some tens of roundings.
        (torch.float32, 1.0, 1e-5),
        # Logits reach 100, and a weight carries the rounding of its logit: 100 times 2^-24, some four times.
        (torch.float32, 30.0, 3e-5),
        # Weights, their gradients and every result are rounded by 2^-9, the part of each block once more.
        (torch.bfloat16, 1.0, 2**-6),
        # The same: logits of bfloat16 would be off by 100 * 2^-9, and weights by a fifth.
        (torch.bfloat16, 30.0, 2**-6),
    ],
    ids=["binary32", "binary32 to 100", "bfloat16", "bfloat16 to 100"],
)
@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("tokens", LENGTHS)
def test_smaller_types_lose_what_their_rounding_loses(
    tokens: int, packing: str, dtype: torch.dtype, size: float, bound: float
) -> None:
    documents = _documents(packing, tokens)
    found = _outputs_and_gradients(_blocks, _inputs(tokens, dtype, size=size), documents)
    wanted = _outputs_and_gradients(_formula, _inputs(tokens, size=size), documents)
    for name, ours, theirs in zip(("out", "q", "k", "v"), found, wanted, strict=True):
        assert ours.dtype == dtype
        # The gradient of a key is a sum of queries.
        assert _error(ours.double(), theirs, unit=size if name == "k" else 1.0) <= bound, name


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("tokens", LENGTHS)
def test_the_largest_logit_is_over_what_attention_sees(tokens: int, packing: str) -> None:
    q, k, v = (x.detach() for x in _inputs(tokens))
    documents = _documents(packing, tokens)
    wanted = _logits(q, k, documents).amax((0, 2, 3))
    _, blocks = attend(q, k, v, documents, scale=SCALE, watch=True)
    torch.testing.assert_close(blocks, wanted, rtol=1e-14, atol=0)
    fused = largest_logits(q, k, documents, scale=SCALE)
    torch.testing.assert_close(fused, wanted.float(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("start", [1, 20, 63, 64, 65, 150])
@pytest.mark.parametrize("packing", PACKINGS)
def test_outputs_of_a_prefix_have_the_same_bits_whatever_follows(start: int, packing: str) -> None:
    inputs = [x.detach() for x in _inputs(200, torch.float32)]
    documents = _documents(packing, 200)
    changed = [x.clone() for x in inputs]
    for x in changed:
        x[:, :, start:] = x[:, :, start:].flip(0) * 30
    found, wanted = _blocks(*changed, documents), _blocks(*inputs, documents)
    assert torch.equal(found[:, :, :start], wanted[:, :, :start])


def test_a_document_has_the_same_bits_and_gradients_whatever_its_neighbours() -> None:
    documents = documents_of_lengths(torch.tensor([0, 50, 140, 200]), tokens=200).expand(2, -1)
    inputs = _inputs(200, torch.float32)
    changed = [x.detach().clone() for x in inputs]
    # Their logits among each other overflow, and their softmax is NaN.
    for x in changed:
        x[:, :, :50], x[:, :, 140:] = 1e30, -1e30
    results = []
    for given in (inputs, [x.requires_grad_() for x in changed]):
        out = _blocks(*given, documents)[:, :, 50:140]
        results.append([out, *(x[:, :, 50:140] for x in torch.autograd.grad(out.sum(), given))])
    for found, wanted in zip(*results, strict=True):
        assert torch.isfinite(wanted).all()
        assert torch.equal(found, wanted)


class _Largest(TorchDispatchMode):
    """Remembers the most elements of a tensor that an operation made."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.element_size())
        return result


def _kept(forward: Callable[[], torch.Tensor]) -> list[int]:
    kept: list[int] = []

    def count(x: torch.Tensor) -> torch.Tensor:
        kept.append(x.untyped_storage().nbytes())
        return x

    with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
        forward()
    return kept


def test_no_tensor_is_larger_than_a_block_and_none_of_a_block_is_kept() -> None:
    tokens, heads = 1000, 6
    inputs = _inputs(tokens, torch.float32)
    documents = _documents("packed", tokens)
    with _Largest() as largest:
        _blocks(*inputs, documents).sum().backward()
    assert largest.elements == heads * 64 * tokens
    kept = sum(_kept(lambda: _blocks(*inputs, documents)))
    # Queries, keys, values, output and one number more per token and head; a document's number per token.
    assert kept == heads * tokens * (12 + 12 + 16 + 16 + 1) * 4 + 2 * tokens * 8


@_TORCH_WARNS
@pytest.mark.parametrize("tokens", [60, 200, 1100], ids=["one block", "four blocks", "too many blocks"])
def test_a_compiler_gives_the_same_gradients_and_keeps_no_block_either(tokens: int) -> None:
    inputs, documents = _inputs(tokens), _documents("packed", tokens)
    # The partitioner decides what is kept, before any code is made.
    compiled = torch.compile(_blocks, backend="aot_eager_decomp_partition", dynamic=False)
    found = _outputs_and_gradients(compiled, inputs, documents)
    for ours, theirs in zip(found, _outputs_and_gradients(_blocks, inputs, documents), strict=True):
        assert _error(ours, theirs) <= 1e-14
    kept = _kept(lambda: compiled(*inputs, documents))
    # Nothing but q, k, v, the output, and scaled or shorter copies of those.
    assert max(kept) <= 6 * tokens * 16 * 8


@_TORCH_WARNS
@pytest.mark.parametrize(
    ("blocks", "products"), [(attention.UNROLLED, 2 * attention.UNROLLED), (attention.UNROLLED + 1, 0)]
)
def test_a_compiler_is_spared_the_blocks_of_a_long_row(
    monkeypatch: pytest.MonkeyPatch, blocks: int, products: int
) -> None:
    monkeypatch.setattr(attention, "ROWS", 8)
    found = []

    def count(graph: torch.fx.GraphModule, _: Any) -> Any:
        parts = [part.graph for part in graph.modules() if isinstance(part, torch.fx.GraphModule)]
        found.extend(node for part in parts for node in part.nodes if node.target is torch.bmm)
        return graph.forward

    q, k, v = (x.detach() for x in _inputs(8 * blocks))
    out = torch.compile(_blocks, backend=count, dynamic=False)(q, k, v, None)
    assert torch.equal(out, _blocks(q, k, v, None))
    assert len(found) == products
