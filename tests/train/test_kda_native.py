"""The native tiles of KDA against the recurrence that defines them."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the training half needs torch (pip install 'twoends[train]')")

from tests.train.native import on_kernels  # noqa: E402
from tests.train.test_kda import GATES, LENGTHS, _documents, _inputs, _outputs_and_gradients  # noqa: E402
from twoends.errors import OptionError  # noqa: E402
from twoends.kernels.built import is_built  # noqa: E402
from twoends.kernels.choose import load_module  # noqa: E402
from twoends.train.delta_rule import SEGMENT_TILES, TILE, recurrent_kda, tiled_kda  # noqa: E402
from twoends.train.kda_native import _tiles, native_kda  # noqa: E402
from twoends.train.native import native_kernels  # noqa: E402

if not is_built():
    pytest.skip("needs the native kernels", allow_module_level=True)

SETS = load_module().available_isas()
NAMES = ("out", "q", "k", "v", "g", "beta")


def _wide_inputs(tokens: int, keys: int, values: int, *, heads: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    q, k, g = (torch.randn(2, tokens, heads, keys, generator=generator) for _ in range(3))
    v = torch.randn(2, tokens, heads, values, generator=generator)
    q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    inputs = [q * keys**-0.5, k, v, -5 * torch.sigmoid(3 * g), torch.rand(q.shape[:3], generator=generator)]
    return [x.requires_grad_() for x in inputs]


def _assert_close(found: list[torch.Tensor], wanted: list[torch.Tensor], *, bound: float) -> None:
    for name, ours, theirs in zip(NAMES, found, wanted, strict=True):
        scale = max(1.0, float(theirs.detach().abs().max()))
        worst = float((ours.detach().double() - theirs.detach()).abs().max())
        assert worst <= bound * scale, f"{name}: off by {worst}, largest {scale}"


@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("tokens", LENGTHS)
def test_outputs_and_gradients_are_those_of_the_recurrence(tokens: int, packed: bool, gates: str) -> None:
    documents = (_documents(tokens),) if packed else ()
    found = _outputs_and_gradients(native_kda, _inputs(tokens, torch.float32, gates=gates), *documents)
    wanted = _outputs_and_gradients(recurrent_kda, _inputs(tokens, gates=gates), *documents)
    _assert_close(found, wanted, bound=1e-5)


@pytest.mark.parametrize(("keys", "values"), [(1, 1), (16, 16), (17, 33), (64, 64), (40, 72), (128, 80)])
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
def test_heads_of_any_width_are_right(keys: int, values: int, packed: bool) -> None:
    inputs = _wide_inputs(43, keys, values)
    documents = (_documents(43),) if packed else ()
    double = [x.detach().double().requires_grad_() for x in inputs]
    found = _outputs_and_gradients(native_kda, inputs, *documents)
    _assert_close(found, _outputs_and_gradients(recurrent_kda, double, *documents), bound=1e-5)


@pytest.mark.parametrize("extra", [0, 1, SEGMENT_TILES * TILE + 17])
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
def test_long_rows_go_back_over_the_states_that_were_kept(extra: int, packed: bool) -> None:
    tokens = SEGMENT_TILES * TILE + extra
    inputs = _wide_inputs(tokens, 4, 3, heads=1)
    documents = (_documents(tokens),) if packed else ()
    double = [x.detach().double().requires_grad_() for x in inputs]
    found = _outputs_and_gradients(native_kda, inputs, *documents)
    _assert_close(found, _outputs_and_gradients(tiled_kda, double, *documents), bound=1e-5)


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_bits_depend_neither_on_threads_nor_on_the_instruction_set(
    isa: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> list[torch.Tensor]:
        return _outputs_and_gradients(native_kda, _wide_inputs(90, 40, 72), _documents(90))

    wanted = run()
    with on_kernels(isa, threads, monkeypatch):
        found = run()
    assert all(map(torch.equal, found, wanted))


def test_every_number_of_the_gradients_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    plain_empty = torch.empty_like

    def poisoned(like: torch.Tensor, **given: object) -> torch.Tensor:
        return plain_empty(like, **given).fill_(float("nan"))  # type: ignore[arg-type]

    monkeypatch.setattr(torch, "empty_like", poisoned)
    found = _outputs_and_gradients(native_kda, _wide_inputs(37, 17, 33), _documents(37))
    assert all(bool(x.isfinite().all()) for x in found)


def test_views_with_other_strides_are_read_as_what_they_are() -> None:
    inputs = [x.detach() for x in _wide_inputs(20, 8, 8)]
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs]
    assert not strided[0].is_contiguous()
    assert torch.equal(native_kda(*strided), native_kda(*inputs))


def test_a_pass_without_gradients_keeps_no_state_and_has_the_same_outputs() -> None:
    inputs = [x.detach() for x in _wide_inputs(SEGMENT_TILES * TILE + 5, 4, 3, heads=1)]
    out, states = _tiles(*inputs, None, False)
    kept_out, kept = _tiles(*inputs, None, True)
    assert (states.numel(), kept.shape) == (0, (2, 1, 4, 3))
    assert torch.equal(out, kept_out)


def test_the_operator_keeps_what_torch_asks_of_operators() -> None:
    for documents in (None, _documents(20)):
        torch.library.opcheck(_tiles, (*_wide_inputs(20, 8, 5), documents, True))


def test_other_types_run_in_torch() -> None:
    inputs = _inputs(20)
    assert torch.equal(native_kda(*inputs), tiled_kda(*inputs))


def test_an_instruction_set_that_is_not_here_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOENDS_ISA", "avx51")
    with pytest.raises(OptionError, match="did you mean 'avx512'"):
        native_kernels()
