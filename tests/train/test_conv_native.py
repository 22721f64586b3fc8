"""The native short convolution against the formula in torch."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the training half needs torch (pip install 'twoends[train]')")

from tests.train.native import on_kernels  # noqa: E402
from twoends.kernels.built import is_built  # noqa: E402
from twoends.kernels.choose import load_module  # noqa: E402
from twoends.train.conv_native import _convolve, native_convolution  # noqa: E402
from twoends.train.convolution import short_convolution  # noqa: E402
from twoends.train.packing import documents_of_lengths  # noqa: E402

if not is_built():
    pytest.skip("needs the native kernels", allow_module_level=True)

SETS = load_module().available_isas()


def _inputs(tokens: int, channels: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens * channels)
    x = torch.randn(2, tokens, channels, generator=generator, dtype=torch.float64) * 3
    weight = torch.randn(channels, 1, 4, generator=generator, dtype=torch.float64)
    return [part.to(dtype).requires_grad_() for part in (x, weight)]


def _documents(tokens: int) -> torch.Tensor:
    """One row cut often, one with padding at its end."""
    cuts = [
        torch.tensor([0, 1, tokens // 3, tokens]).cummax(0).values,
        torch.tensor([0, tokens - tokens // 3]),
    ]
    return torch.cat([documents_of_lengths(cut.clamp(max=tokens), tokens=tokens) for cut in cuts])


def _outputs_and_gradients(convolve: object, inputs: list[torch.Tensor], *rest: object) -> list[torch.Tensor]:
    out = convolve(*inputs, *rest)  # type: ignore[operator]
    pull = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    return [out, *torch.autograd.grad((out * pull.to(out.dtype)).sum(), inputs)]


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 33])
@pytest.mark.parametrize("channels", [1, 16, 31, 32, 33, 96])
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
def test_outputs_and_gradients_are_those_of_the_formula(tokens: int, channels: int, packed: bool) -> None:
    documents = (_documents(tokens),) if packed else ()
    found = _outputs_and_gradients(native_convolution, _inputs(tokens, channels), *documents)
    wanted = _outputs_and_gradients(short_convolution, _inputs(tokens, channels, torch.float64), *documents)
    for ours, theirs in zip(found, wanted, strict=True):
        # Sums of 4 products, and over 66 tokens for the filters: their rounding in binary32.
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_bits_depend_neither_on_threads_nor_on_the_instruction_set(
    isa: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> list[torch.Tensor]:
        return _outputs_and_gradients(native_convolution, _inputs(70, 200), _documents(70))

    wanted = run()
    with on_kernels(isa, threads, monkeypatch):
        found = run()
    assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("tokens", [2, 9])
def test_a_document_has_the_same_bits_alone(tokens: int) -> None:
    x, weight = (part.detach() for part in _inputs(tokens, 40))
    cut = tokens // 2
    documents = documents_of_lengths(torch.tensor([0, cut, tokens]), tokens=tokens).expand(2, -1)
    alone = [native_convolution(part.contiguous(), weight) for part in (x[:, :cut], x[:, cut:])]
    assert torch.equal(native_convolution(x, weight, documents), torch.cat(alone, 1))


def test_every_number_of_the_gradients_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = torch.empty_like

    def poisoned(like: torch.Tensor, **given: object) -> torch.Tensor:
        return plain(like, **given).fill_(float("nan"))  # type: ignore[arg-type]

    monkeypatch.setattr(torch, "empty_like", poisoned)
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda x, *shape: x.new_full(shape, float("nan")))
    found = _outputs_and_gradients(native_convolution, _inputs(37, 41), _documents(37))
    assert all(bool(part.isfinite().all()) for part in found)


def test_other_types_and_other_filters_run_in_torch() -> None:
    double = _inputs(20, 8, torch.float64)
    assert torch.equal(native_convolution(*double), short_convolution(*double))
    x, weight = _inputs(20, 8)
    three = weight[..., 1:]
    assert torch.equal(native_convolution(x, three), short_convolution(x, three))


def test_the_operator_keeps_what_torch_asks_of_operators() -> None:
    x, weight = _inputs(20, 8)
    filters = weight.detach()[:, 0].requires_grad_()
    for documents in (None, _documents(20)):
        torch.library.opcheck(_convolve, (x, filters, documents))
