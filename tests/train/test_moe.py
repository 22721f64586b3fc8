"""The mixture: where rows stand, that experts multiply just their own, and what the bias may do."""

from __future__ import annotations

import functools
import math

import pytest

torch = pytest.importorskip("torch", reason="the training half needs torch (pip install 'twoends[train]')")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from tests.train.models import tiny_architecture  # noqa: E402
from twoends.train import expert_rows as expert_rows_module  # noqa: E402
from twoends.train import moe as moe_module  # noqa: E402
from twoends.train.balance import rebalance  # noqa: E402
from twoends.train.expert_rows import (  # noqa: E402
    block_rows,
    expert_products,
    expert_rows,
    expert_weight_gradients,
    to_experts,
    to_tokens,
)
from twoends.train.model import KimiK3  # noqa: E402
from twoends.train.moe import ExpertBank, LatentMoe, Router  # noqa: E402

# Loads of 6 experts: [N,S] choices that leave some without rows, and all to one.
UNEVEN = torch.tensor([[1, 4], [4, 1], [4, 2], [1, 4], [4, 0], [4, 1], [2, 4]])
ONE = torch.full((9, 1), 3)
# Many to one, and numbers of rows around 64, in which bfloat16 goes on a CPU.
MANY = torch.tensor([0] * 200 + [1] * 65 + [2] * 64 + [3] * 63 + [4])[:, None]


@pytest.mark.parametrize("tokens", [1, 5, 300])
def test_rows_are_all_choices_by_expert_and_inside_an_expert_by_token(tokens: int) -> None:
    chosen = torch.randint(0, 6, (tokens, 2), generator=torch.Generator().manual_seed(tokens))
    rows = expert_rows(chosen, num_experts=6)
    wanted = sorted(range(2 * tokens), key=lambda choice: (int(chosen.flatten()[choice]), choice))
    assert rows.choice_R.tolist() == wanted
    assert rows.choice_R[rows.row_NS.flatten()].tolist() == list(range(2 * tokens))
    assert rows.end_E.tolist() == [int((chosen <= expert).sum()) for expert in range(6)]


@pytest.mark.parametrize("chosen", [UNEVEN, ONE, MANY])
def test_blocks_belong_to_one_expert_and_end_in_rows_of_zeros(chosen: torch.Tensor) -> None:
    plain, blocks = (expert_rows(chosen, num_experts=6, block=block) for block in (1, 4))
    room = blocks.end_E.diff(prepend=torch.zeros(1, dtype=torch.int32))
    load = plain.end_E.diff(prepend=torch.zeros(1, dtype=torch.int32))
    assert torch.equal(room, (load + 3) // 4 * 4)
    at = 0
    for expert in range(6):
        of_expert = blocks.choice_R[at : at + int(room[expert])].tolist()
        choices = (chosen.flatten() == expert).nonzero().flatten().tolist()
        assert of_expert == choices + [-1] * (len(of_expert) - len(choices))
        at += len(of_expert)
    assert (blocks.choice_R[at:] == -1).all()
    assert len(blocks.choice_R) == (chosen.numel() + 6 * 3) // 4 * 4
    assert not to_experts(torch.ones(len(chosen), 5), blocks)[blocks.choice_R < 0].any()


@pytest.mark.parametrize("block", [1, 4])
def test_what_goes_to_experts_comes_back_to_its_token(block: int) -> None:
    x = torch.randn(7, 5)
    rows = expert_rows(UNEVEN, num_experts=6, block=block)
    assert torch.equal(to_tokens(to_experts(x, rows), rows), x[:, None].expand(7, 2, 5))


def test_blocks_are_for_small_matrices_in_bfloat16_or_of_many_experts() -> None:
    shapes = (16, 8, 8), (64, 8, 8), (16, 512, 256)
    few, many, large = (torch.empty(shape, device="meta") for shape in shapes)
    bf16, f32 = torch.bfloat16, torch.float32
    # Blocks are an eighth of the mean load at most, but 16 rows.
    loads = {1024: 128, 1023: 64, 256: 32, 255: 16, 2: 16, 9000: 128}
    assert {load: block_rows(16 * load, few, dtype=bf16) for load in loads} == loads
    assert block_rows(16 * 2, few, dtype=f32) == 1
    assert [block_rows(64 * load, many, dtype=f32) for load in (2, 255, 256)] == [16, 16, 1]
    assert block_rows(16 * 1024, large, dtype=bf16) == 1


def _drawn(rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Rows [R,8], weights [6,16,8] and a gradient [R,16] for them: whole numbers, whose sums are exact."""
    generator = torch.Generator().manual_seed(3)
    shapes = (rows, 8), (6, 16, 8), (rows, 16)
    return tuple(torch.randint(-3, 4, shape, generator=generator).to(dtype) for shape in shapes)


def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every buffer that a product is written to begins as NaN."""
    new_empty = torch.Tensor.new_empty

    def poisoned(tensor: torch.Tensor, *shape: int) -> torch.Tensor:
        return new_empty(tensor, *shape).fill_(math.nan)

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)


@pytest.mark.parametrize(("block", "at_once"), [(1, False), (4, False), (1, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chosen", [UNEVEN, ONE, MANY])
def test_products_are_those_of_each_experts_rows(
    chosen: torch.Tensor, dtype: torch.dtype, block: int, at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if at_once:
        if not hasattr(torch.nn.functional, "grouped_mm"):
            pytest.skip("this torch has no product of groups")
        monkeypatch.setattr(expert_rows_module, "_multiplies_at_once", lambda *_: True)
    rows = expert_rows(chosen, num_experts=6, block=block)
    x, weight, grad = _drawn(len(rows.choice_R), dtype)
    _poisoned(monkeypatch)
    y = expert_products(x, weight, rows.end_E, block, True)
    back = expert_products(grad, weight, rows.end_E, block, False)
    gradient = expert_weight_gradients(grad, x, rows.end_E)
    ends = [0, *rows.end_E.tolist()]
    for expert in range(6):
        own = slice(ends[expert], ends[expert + 1])
        x_of, weight_of, grad_of = x[own].double(), weight[expert].double(), grad[own].double()
        assert torch.equal(y[own], (x_of @ weight_of.T).to(dtype))
        assert torch.equal(back[own], (grad_of @ weight_of).to(dtype))
        assert torch.equal(gradient[expert], (grad_of.T @ x_of).to(dtype))
    assert not gradient[5].any()
    # Rows after the last block meet zeros going back; a NaN there would spread.
    assert y.isfinite().all()
    assert back.isfinite().all()


@pytest.mark.parametrize("block", [1, 4])
@pytest.mark.parametrize("transpose", [True, False])
def test_products_keep_the_promises_of_an_operator(block: int, transpose: bool) -> None:
    rows = expert_rows(UNEVEN, num_experts=6, block=block)
    x, weight, grad = _drawn(len(rows.choice_R), torch.float64)
    left = (x if transpose else grad).requires_grad_()
    torch.library.opcheck(expert_products, (left, weight.requires_grad_(), rows.end_E, block, transpose))


def _bank() -> ExpertBank:
    bank = ExpertBank(tiny_architecture()).double()
    bank.reset_parameters(torch.Generator().manual_seed(5))
    return bank


def _plain(bank: ExpertBank, z_NZ: torch.Tensor, chosen_NS: torch.Tensor) -> torch.Tensor:
    """Outputs [N,S,Z] token by token and expert by expert."""
    w1, w2, w3 = (bank.quantise(w) for w in (bank.w1, bank.w2, bank.w3))
    outputs = [
        w2[e] @ bank.activation(torch.cat([w1[e] @ z, w3[e] @ z]))
        for z, experts in zip(z_NZ, chosen_NS, strict=True)
        for e in experts
    ]
    return torch.stack(outputs).unflatten(0, chosen_NS.shape)


@pytest.mark.parametrize("block", [1, 4])
@pytest.mark.parametrize("chosen", [UNEVEN, ONE])
def test_a_bank_and_all_its_gradients_are_those_of_the_plain_formula(
    chosen: torch.Tensor, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bank = _bank()
    generator = torch.Generator().manual_seed(6)
    z = torch.randn(len(chosen), 32, dtype=torch.float64, generator=generator).requires_grad_()
    weights = torch.rand(*chosen.shape, 1, dtype=torch.float64, generator=generator).requires_grad_()
    grad = torch.randn(len(chosen), 32, dtype=torch.float64, generator=generator)
    inputs = (z, weights, bank.w1, bank.w2, bank.w3)
    plain = (_plain(bank, z, chosen) * weights).sum(1)
    wanted = (plain, *torch.autograd.grad(plain, inputs, grad))
    _poisoned(monkeypatch)
    own = (bank(z, expert_rows(chosen, num_experts=6, block=block)) * weights).sum(1)
    found = (own, *torch.autograd.grad(own, inputs, grad))
    for number, right in zip(found, wanted, strict=True):
        assert (number - right).norm() <= 1e-12 * right.norm()
    idle = next(expert for expert in range(6) if not (chosen == expert).any())
    assert all(not gradient[idle].any() for gradient in found[3:])


def _gradient_bits(moe: LatentMoe, x: torch.Tensor) -> list[torch.Tensor]:
    out = moe(x)
    return [out, *torch.autograd.grad(out.square().sum(), [x, *moe.parameters()])]


@pytest.mark.parametrize("block", [1, 32])
def test_a_pass_repeated_has_the_same_bits(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe_module, "block_rows", lambda *_, **__: block)
    moe = _moe().float()
    x = torch.randn(4, 50, 32, generator=torch.Generator().manual_seed(7)).requires_grad_()
    first, second = _gradient_bits(moe, x), _gradient_bits(moe, x)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# The tracer warns of what it does itself, and hides that where warnings aren't errors.
@pytest.mark.filterwarnings("ignore")
def test_a_traced_mixture_is_the_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model = KimiK3(tiny_architecture()).initialise(2).double()
    moe = model.model.layers[1].block_sparse_moe
    x = torch.randn(4, 50, 32, dtype=torch.float64, requires_grad=True)
    plain = _gradient_bits(moe, x)
    # What the compiler is given, without the compiler.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    model.compile_parts()
    for traced, wanted in zip(_gradient_bits(moe, x), plain, strict=True):
        assert (traced - wanted).norm() <= 1e-12 * wanted.norm()


class _Largest(TorchDispatchMode):
    """The most numbers that any tensor made inside has."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else [made]:
            if isinstance(tensor, torch.Tensor):
                self.numbers = max(self.numbers, tensor.numel())
        return made


def test_one_busy_expert_makes_no_room_for_the_others() -> None:
    bank, tokens = _bank(), 2000
    z = torch.randn(tokens, 32, dtype=torch.float64, requires_grad=True)
    rows = expert_rows(torch.full((tokens, 1), 3), num_experts=6)
    with _Largest() as largest:
        bank(z, rows).sum().backward()
    # Gate and up of every row are the widest; the weights are far smaller.
    assert largest.numbers == tokens * 2 * bank.w1.shape[1]


def _moe() -> LatentMoe:
    model = KimiK3(tiny_architecture()).initialise(2).double().eval()
    moe: LatentMoe = model.model.layers[1].block_sparse_moe
    torch.nn.init.uniform_(moe.gate.e_score_correction_bias, -0.3, 0.3)
    return moe


def test_the_batched_form_is_the_sum_over_chosen_experts_of_each_token() -> None:
    moe = _moe()
    x = torch.randn(2, 9, 32, dtype=torch.float64)
    bank = moe.experts
    with torch.no_grad():
        chosen, weights = moe.gate(x.flatten(0, 1))
        w1, w2, w3 = (bank.quantise(w) for w in (bank.w1, bank.w2, bank.w3))
        rows = []
        for token, experts, shares in zip(x.flatten(0, 1), chosen, weights, strict=True):
            z = moe.routed_expert_down_proj(token)
            routed = sum(
                share * (w2[e] @ bank.activation(torch.cat([w1[e] @ z, w3[e] @ z])))
                for e, share in zip(experts, shares, strict=True)
            )
            latent = moe.routed_expert_norm(routed)
            rows.append(moe.routed_expert_up_proj(latent) + moe.shared_experts(token))
        torch.testing.assert_close(moe(x).flatten(0, 1), torch.stack(rows), rtol=0, atol=1e-12)


def test_the_bias_selects_and_never_weighs() -> None:
    router = Router(tiny_architecture()).eval()
    router.reset_parameters(torch.Generator().manual_seed(1))
    x = torch.randn(50, 32)
    router.e_score_correction_bias[4] = 10
    chosen, weights = router(x)
    scores = torch.sigmoid(x @ router.weight.T).gather(1, chosen)
    assert (chosen == 4).any(1).all()
    torch.testing.assert_close(weights, scores / scores.sum(1, keepdim=True))


def test_rebalancing_without_a_training_pass_is_refused() -> None:
    router = Router(tiny_architecture()).eval()
    router.reset_parameters(torch.Generator().manual_seed(1))
    router(torch.randn(5, 32))
    with pytest.raises(RuntimeError, match="training forward pass"):
        rebalance([router], method="quantile")
