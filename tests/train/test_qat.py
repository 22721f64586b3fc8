"""Fake quantisation: what the trainer multiplies is what the checkpoint stores.

Oracles: the checkpoint's codec for MXFP4, torch's float8 cast with scales from binary64 logarithms for MXFP8,
and torchao for both where it is installed.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the training half needs torch (pip install 'twoends[train]')")

from safetensors.torch import load_file  # noqa: E402

from tests.train.models import tiny_architecture  # noqa: E402
from tests.train.test_export import RANKS  # noqa: E402
from twoends.checkpoint import mxfp4  # noqa: E402
from twoends.errors import OptionError  # noqa: E402
from twoends.kernels.reference.mxfp8 import mxfp8  # noqa: E402
from twoends.train.export import export_checkpoint, load_checkpoint  # noqa: E402
from twoends.train.model import KimiK3  # noqa: E402
from twoends.train.moe import ExpertBank  # noqa: E402
from twoends.train.qat import E2M1, E4M3, ElementFormat, FakeQuantise, block_exponents, quantise  # noqa: E402


def _numbers(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(48, 96, generator=generator) * torch.logspace(-30, 30, 48)[:, None]
    rows[3] = 0
    rows[4, ::2] = -0.0
    rows[5] = torch.tensor([0.25, -0.75, 1.25, 6.0]).repeat(24)
    rows[6] = torch.tensor([448.0, -(2.0**-9), 3 * 2.0**-10, -232.0]).repeat(24)
    rows[7] = rows[7].sign() * 2.0 ** torch.randint(-20, 9, (96,), generator=generator)
    return rows


def _mxfp8_by_cast(x: torch.Tensor) -> torch.Tensor:
    """MXFP8 of x from the definition: 2^ceil(log2(amax / 448)) in binary64, elements by torch's cast."""
    blocks = x.double().unflatten(-1, (-1, 32))
    amax = blocks.abs().amax(-1, keepdim=True)
    scale = torch.where(amax > 0, 2.0 ** torch.ceil(torch.log2(amax / 448)).clamp_min(-127), 1.0)
    return ((blocks / scale).float().to(torch.float8_e4m3fn).double() * scale).flatten(-2).float()


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_forward_pass_sees_what_the_checkpoint_codec_stores(seed: int) -> None:
    weights = _numbers(seed)
    stored = mxfp4.decode(*mxfp4.encode(weights.numpy()))
    np.testing.assert_array_equal(FakeQuantise()(weights).numpy(), stored)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_exponents_are_the_scale_bytes_of_the_checkpoint_codec(seed: int) -> None:
    weights = _numbers(seed)
    np.testing.assert_array_equal(block_exponents(weights).numpy() + 127, mxfp4.encode(weights.numpy())[1])


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_mxfp8_is_torchs_float8_under_the_rceil_scale(seed: int) -> None:
    x = _numbers(seed)
    assert torch.equal(FakeQuantise(E4M3)(x), _mxfp8_by_cast(x))


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_mxfp8_has_the_bits_of_the_engine(seed: int) -> None:
    x = _numbers(seed)
    assert np.array_equal(FakeQuantise(E4M3)(x).numpy().view(np.uint32), mxfp8(x.numpy()).view(np.uint32))


def test_every_e4m3_value_is_kept_and_every_midpoint_goes_to_the_even_code() -> None:
    codes = torch.arange(0, 127, dtype=torch.uint8)
    values = codes.view(torch.float8_e4m3fn).float()
    midpoints = (values[1:] + values[:-1]) / 2
    even = torch.where(codes[:-1] % 2 == 0, values[:-1], values[1:])
    for given, wanted in ((values, values), (midpoints, even)):
        padded = torch.zeros(128 * 32).view(128, 32)
        padded[: len(given), 0], padded[:, 1] = given, 448
        assert torch.equal(FakeQuantise(E4M3)(padded)[: len(given), 0], wanted)


@pytest.mark.parametrize(("element", "name"), [(E2M1, "float4_e2m1fn_x2"), (E4M3, "float8_e4m3fn")])
@pytest.mark.parametrize("seed", [1, 2])
def test_elements_and_scales_are_torchaos(element: ElementFormat, name: str, seed: int) -> None:
    mx_tensor = pytest.importorskip(
        "torchao.prototype.mx_formats.mx_tensor", reason="torchao is not installed"
    )
    x = _numbers(seed)
    x = x[x.abs().amax(1) > 0]  # a block of zeros has another scale byte there, and the same values
    mode = mx_tensor.ScaleCalculationMode.RCEIL
    scale, elements = mx_tensor.to_mx(x, getattr(torch, name), 32, mode)
    values, exponent = quantise(x, element)
    assert torch.equal(scale.view(torch.uint8).int(), exponent + 127)
    if element is E4M3:
        assert torch.equal(elements.float(), values)
    else:
        np.testing.assert_array_equal(elements.numpy(), mxfp4.encode(x.numpy())[0])


@pytest.mark.parametrize("element", [E2M1, E4M3])
def test_the_gradient_passes_straight_through(element: ElementFormat) -> None:
    x = _numbers(6).requires_grad_()
    pull = torch.randn(48, 96)
    (FakeQuantise(element)(x) * pull).sum().backward()
    assert torch.equal(x.grad, pull)


@pytest.mark.parametrize("element", [E2M1, E4M3])
def test_quantising_twice_changes_no_value(element: ElementFormat) -> None:
    once = FakeQuantise(element)(_numbers(7))
    assert torch.equal(FakeQuantise(element)(once), once)


@pytest.mark.parametrize("element", [E2M1, E4M3])
def test_bfloat16_numbers_are_quantised_exactly_as_binary32_ones(element: ElementFormat) -> None:
    x = _numbers(8).bfloat16()
    assert torch.equal(FakeQuantise(element)(x).float(), FakeQuantise(element)(x.float()))


@pytest.mark.parametrize("element", [E2M1, E4M3])
def test_the_sign_of_zero_is_kept(element: ElementFormat) -> None:
    x = torch.tensor([-0.0, 0.0, -1e-9, 1.0] * 8)[None]
    assert FakeQuantise(element)(x).signbit().tolist() == x.signbit().tolist()


@pytest.mark.parametrize(
    ("amax", "exponent", "element"),
    [
        (6.0, 0, E2M1), (6.0001, 1, E2M1), (3.0, -1, E2M1), (3.0001, 0, E2M1), (4.0, 0, E2M1),
        (1.0, -2, E2M1), (448.0, 0, E4M3), (448.1, 1, E4M3), (224.0, -1, E4M3), (1.0, -8, E4M3),
        (1.76, -7, E4M3), (1e-45, -127, E4M3), (0.0, 0, E4M3),
    ],
)  # fmt: skip
def test_the_scale_is_the_least_power_that_saturates_nothing(
    amax: float, exponent: int, element: ElementFormat
) -> None:
    block = torch.zeros(1, 32)
    block[0, 7] = -amax
    assert block_exponents(block, element).item() == exponent


def test_ties_go_to_the_even_code() -> None:
    block = torch.zeros(1, 32)
    block[0, :8] = torch.tensor([6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert FakeQuantise()(block)[0, :8].tolist() == [6.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]


def test_a_width_that_is_no_multiple_of_32_is_refused() -> None:
    with pytest.raises(ValueError, match=r"blocks are 32 wide.*\(4, 40\)"):
        FakeQuantise()(torch.zeros(4, 40))


def test_inputs_of_both_expert_products_are_mxfp8() -> None:
    model = KimiK3(tiny_architecture()).initialise(4).eval()
    model.quantise_experts(weights="mxfp4", activations="mxfp8")
    moe = model.model.layers[1].block_sparse_moe
    bank: ExpertBank = moe.experts
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        chosen, weights = moe.gate(x)
        w1, w2, w3 = (torch.from_numpy(_coded(w)) for w in (bank.w1, bank.w2, bank.w3))
        rows = []
        for token, experts, shares in zip(x, chosen, weights, strict=True):
            z = _mxfp8_by_cast(moe.routed_expert_down_proj(token)[None])[0]
            hidden = [
                _mxfp8_by_cast(bank.activation(torch.cat([w1[e] @ z, w3[e] @ z]))[None])[0] for e in experts
            ]
            routed = sum(s * (w2[e] @ h) for e, s, h in zip(experts, shares, hidden, strict=True))
            rows.append(moe.routed_expert_up_proj(moe.routed_expert_norm(routed)) + moe.shared_experts(token))
        torch.testing.assert_close(moe(x[None])[0], torch.stack(rows), rtol=0, atol=1e-5)


def _coded(weight: torch.Tensor) -> np.ndarray:
    return np.stack([mxfp4.decode(*mxfp4.encode(matrix)) for matrix in weight.detach().numpy()])


def test_mxfp8_training_reaches_every_expert_parameter() -> None:
    model = KimiK3(tiny_architecture()).initialise(4).train()
    model.quantise_experts(weights="mxfp4", activations="mxfp8")
    ids = torch.arange(80).view(2, 40) * 11 % 600
    model.loss(ids[:, :-1], ids[:, 1:], ignore=-1).backward()
    banks = [m for m in model.modules() if isinstance(m, ExpertBank)]
    assert all(p.grad.isfinite().all() and p.grad.any() for bank in banks for p in bank.parameters())


@pytest.mark.parametrize("choice", [{"weights": "fp4"}, {"activations": "fp8"}])
def test_an_unknown_format_is_refused_with_the_known_ones(choice: dict[str, str]) -> None:
    with pytest.raises(OptionError, match="known are"):
        KimiK3(tiny_architecture()).quantise_experts(**({"weights": "mxfp4", "activations": "none"} | choice))


def _bytes_of(folder: Path) -> dict[str, torch.Tensor]:
    stored: dict[str, torch.Tensor] = {}
    for shard in sorted(folder.glob("model-*.safetensors")):
        stored |= load_file(shard)
    return stored


def test_a_checkpoint_that_nobody_trained_is_exported_byte_by_byte(tmp_path: Path) -> None:
    export_checkpoint(KimiK3(tiny_architecture()).initialise(1), tmp_path / "first", ranks=RANKS)
    stored = _bytes_of(tmp_path / "first")
    anew = 0
    for name, packed in stored.items():
        if name.endswith("weight_packed"):
            scale = stored[name.replace("_packed", "_scale")].numpy()
            anew += int((mxfp4.encode(mxfp4.decode(packed.numpy(), scale))[1] != scale).sum())
    # A block whose largest code is 3 would be coded anew under another scale: the test isn't empty.
    assert anew > 100
    export_checkpoint(load_checkpoint(tmp_path / "first"), tmp_path / "second", ranks=RANKS)
    found = _bytes_of(tmp_path / "second")
    assert found.keys() == stored.keys()
    assert [name for name in stored if not torch.equal(found[name], stored[name])] == []


def test_one_expert_that_moved_changes_its_own_bytes_only(tmp_path: Path) -> None:
    export_checkpoint(KimiK3(tiny_architecture()).initialise(1), tmp_path / "first", ranks=RANKS)
    model = load_checkpoint(tmp_path / "first")
    with torch.no_grad():
        model.model.layers[2].block_sparse_moe.experts.w1[3].mul_(1.3)
    export_checkpoint(model, tmp_path / "second", ranks=RANKS)
    stored, found = _bytes_of(tmp_path / "first"), _bytes_of(tmp_path / "second")
    changed = {name for name in stored if not torch.equal(found[name], stored[name])}
    prefix = "language_model.model.layers.2.block_sparse_moe.experts.3.w1."
    assert changed == {f"{prefix}weight_packed", f"{prefix}weight_scale"}


def test_exported_bytes_are_those_the_last_forward_pass_multiplied(tmp_path: Path) -> None:
    model = KimiK3(tiny_architecture()).initialise(1).train()
    seen: dict[str, list[torch.Tensor]] = {}
    names = [name for name, module in model.named_modules() if isinstance(module, ExpertBank)]
    for name in names:
        held = seen[name] = []
        quantiser = model.get_submodule(name).quantise
        quantiser.register_forward_pre_hook(lambda _, given, held=held: held.append(given[0]))
    model.loss(torch.arange(20)[None], torch.arange(1, 21)[None], ignore=-1)
    export_checkpoint(model, tmp_path, ranks=RANKS)
    stored = _bytes_of(tmp_path)
    for name in names:
        # The bank quantises w1, w3, w2 in this order.
        for place, matrix in enumerate(("w1", "w3", "w2")):
            values, exponent = quantise(seen[name][place])
            for expert in range(6):
                prefix = f"language_model.{name}.{expert}.{matrix}.weight_"
                packed, scale = stored[f"{prefix}packed"].numpy(), stored[f"{prefix}scale"].numpy()
                assert np.array_equal(scale, exponent[expert].numpy() + 127)
                assert np.array_equal(packed, mxfp4.recode(_times(values[expert], scale), scale))


def _times(values: torch.Tensor, scale: np.ndarray) -> np.ndarray:
    blocks = values.numpy().reshape(*scale.shape, 32)
    return np.ldexp(blocks, scale.astype(np.int32)[..., None] - 127).reshape(values.shape)
