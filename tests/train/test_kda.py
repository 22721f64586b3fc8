"""KDA: the tile form against the recurrence that defines it."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the training half needs torch (pip install 'twoends[train]')")

from tests.train.models import tiny_architecture  # noqa: E402
from twoends.kernels.built import is_built  # noqa: E402
from twoends.train import delta_rule  # noqa: E402
from twoends.train.convolution import short_convolution  # noqa: E402
from twoends.train.delta_rule import recurrent_kda, tiled_kda  # noqa: E402
from twoends.train.kda import l2_normalise  # noqa: E402
from twoends.train.kda_choice import Kernel  # noqa: E402
from twoends.train.kda_native import native_kda  # noqa: E402
from twoends.train.model import KimiK3  # noqa: E402
from twoends.train.packing import documents_of_lengths  # noqa: E402

NATIVE = pytest.mark.skipif(not is_built(), reason="needs the native kernels")
KERNELS = pytest.mark.parametrize(
    "kda", [pytest.param(tiled_kda, id="torch"), pytest.param(native_kda, id="native", marks=NATIVE)]
)
GATES = ("random", "at the bound", "nearly open", "mixed")
LENGTHS = (1, 2, 15, 16, 17, 64, 100)


def _inputs(tokens: int, dtype: torch.dtype = torch.float64, *, gates: str = "random") -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    q, k, g = (torch.randn(2, tokens, 3, 8, dtype=torch.float64, generator=generator) for _ in range(3))
    v = torch.randn(2, tokens, 3, 5, dtype=torch.float64, generator=generator)
    beta = torch.rand(2, tokens, 3, dtype=torch.float64, generator=generator)
    g = {
        "random": -5 * torch.sigmoid(g),
        "at the bound": torch.full_like(g, -5.0),
        "nearly open": torch.full_like(g, -1e-6),
        # Half the channels forget at once and then keep: large sums with small differences.
        "mixed": torch.where(torch.arange(tokens)[:, None, None] % 16 < 8, -5.0, -1e-3 * g.abs()),
    }[gates]
    inputs = [l2_normalise(q) * 8**-0.5, l2_normalise(k), v, g, beta]
    return [x.to(dtype).requires_grad_() for x in inputs]


def _documents(tokens: int) -> torch.Tensor:
    """Two rows cut at other places, one with padding at its end."""
    cuts = [torch.tensor([0, tokens // 3, tokens // 2, tokens]), torch.tensor([0, tokens - tokens // 5])]
    return torch.cat([documents_of_lengths(cut, tokens=tokens) for cut in cuts])


def _outputs_and_gradients(kda: object, inputs: list[torch.Tensor], *rest: object) -> list[torch.Tensor]:
    out = kda(*inputs, *rest)  # type: ignore[operator]
    pull = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    return [out, *torch.autograd.grad((out * pull.to(out.dtype)).sum(), inputs)]


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=["binary64", "binary32"]
)
@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("tokens", LENGTHS)
def test_tiles_give_outputs_and_gradients_of_the_recurrence(
    tokens: int, packed: bool, gates: str, dtype: torch.dtype, bound: float
) -> None:
    documents = (_documents(tokens),) if packed else ()
    found = _outputs_and_gradients(tiled_kda, _inputs(tokens, dtype, gates=gates), *documents)
    wanted = _outputs_and_gradients(recurrent_kda, _inputs(tokens, gates=gates), *documents)
    for name, ours, theirs in zip(("out", "q", "k", "v", "g", "beta"), found, wanted, strict=True):
        assert float((ours - theirs).detach().abs().max()) <= bound, name


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
def test_stretches_that_run_again_give_the_same_outputs_and_gradients(
    monkeypatch: pytest.MonkeyPatch, packed: bool
) -> None:
    documents = (_documents(100),) if packed else ()
    whole = _outputs_and_gradients(tiled_kda, _inputs(100), *documents)
    monkeypatch.setattr(delta_rule, "SEGMENT_TILES", 2)
    stretched = _outputs_and_gradients(tiled_kda, _inputs(100), *documents)
    for ours, theirs in zip(stretched, whole, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-13)


def test_a_long_sequence_keeps_one_state_in_a_thousand_tokens() -> None:
    kept = 0

    def count(x: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        kept += x.numel() * x.element_size()
        return x

    heads, channels, tokens = 1, 64, 4096
    shape = (1, tokens, heads, channels)
    inputs = [torch.zeros(shape, requires_grad=True) for _ in range(4)]
    with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
        tiled_kda(*inputs, torch.zeros(shape[:3], requires_grad=True))
    every_state = tokens // 16 * heads * channels * channels * 4
    inputs_and_states = tokens * heads * (4 * channels + 1) * 4 + 4 * heads * channels * channels * 4
    assert kept <= 1.1 * inputs_and_states < 1.2 * every_state


@KERNELS
@pytest.mark.parametrize("start", [1, 15, 16, 20, 47])
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
def test_outputs_of_a_prefix_have_the_same_bits_whatever_follows(
    start: int, packed: bool, kda: Kernel
) -> None:
    inputs = [x.detach().float() for x in _inputs(48)]
    documents = (_documents(48),) if packed else ()
    changed = [x.clone() for x in inputs]
    for x in changed:
        x[:, start:] = x[:, start:].flip(0) * 0.5
    found, wanted = kda(*changed, *documents), kda(*inputs, *documents)
    assert torch.equal(found[:, :start], wanted[:, :start])


@KERNELS
def test_a_document_has_the_same_bits_whatever_its_neighbours(kda: Kernel) -> None:
    inputs = [x.detach().float() for x in _inputs(48)]
    documents = documents_of_lengths(torch.tensor([0, 5, 27, 48]), tokens=48).expand(2, -1)
    changed = [x.clone() for x in inputs]
    for x in changed:
        x[:, :5] = x[:, :5].flip(0) * 0.5
        x[:, 27:] = x[:, 27:].flip(0) * 0.5
    found, wanted = kda(*changed, documents), kda(*inputs, documents)
    assert torch.equal(found[:, 5:27], wanted[:, 5:27])


@KERNELS
def test_identical_keys_do_not_blow_up_the_tile(kda: Kernel) -> None:
    q, _, v, g, _ = _inputs(32, torch.float32)
    k = torch.zeros_like(q)
    k[..., 0] = 1
    g, beta = torch.zeros_like(g), torch.full(q.shape[:3], 0.9)
    double = [x.double() for x in (q, k, v, g, beta)]
    # A power series of the coupling would lose 4 digits here; substitution keeps binary32's seven.
    torch.testing.assert_close(kda(q, k, v, g, beta).double(), recurrent_kda(*double), rtol=0, atol=2e-5)


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


@pytest.mark.parametrize("tokens", [1, 2, 3, 9])
def test_the_convolution_does_not_look_into_another_document(tokens: int) -> None:
    x = torch.randn(1, tokens, 5, generator=torch.Generator().manual_seed(1))
    weight = torch.randn(5, 1, 4, generator=torch.Generator().manual_seed(2))
    cut = tokens // 2
    documents = documents_of_lengths(torch.tensor([0, cut, tokens]), tokens=tokens)
    alone = [short_convolution(part, weight) for part in (x[:, :cut], x[:, cut:])]
    # Not to the bit: the SiLU of a vector and of a tail differ in the last place.
    torch.testing.assert_close(short_convolution(x, weight, documents), torch.cat(alone, 1))


def test_packed_documents_have_the_logits_they_have_alone() -> None:
    model = KimiK3(tiny_architecture()).initialise(3).double().eval()
    model.quantise_experts(weights="none", activations="none")
    ids = torch.randint(0, 600, (1, 60), generator=torch.Generator().manual_seed(1))
    lengths = torch.tensor([0, 7, 41, 60])
    with torch.no_grad():
        packed = model(ids, documents_of_lengths(lengths, tokens=60))
        alone = [model(ids[:, a:b]) for a, b in ((0, 7), (7, 41), (41, 60))]
    torch.testing.assert_close(packed, torch.cat(alone, 1), rtol=0, atol=1e-11)
