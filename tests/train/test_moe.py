"""The mixture: where choices stand, what the bias may do, and the batched form against a plain loop."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the training half needs torch (pip install 'twoends[train]')")

from tests.train.models import tiny_architecture  # noqa: E402
from twoends.train.balance import rebalance  # noqa: E402
from twoends.train.model import KimiK3  # noqa: E402
from twoends.train.moe import LatentMoe, Router, expert_slots  # noqa: E402


@pytest.mark.parametrize("tokens", [1, 5, 300])
def test_every_choice_has_a_slot_of_its_own_in_its_experts_room(tokens: int) -> None:
    chosen = torch.randint(0, 6, (tokens, 2), generator=torch.Generator().manual_seed(tokens))
    slots, room = expert_slots(chosen, num_experts=6)
    assert len(set(slots.tolist())) == 2 * tokens
    assert torch.equal(slots // room, chosen.flatten())


def test_one_expert_that_takes_everything_drops_nothing() -> None:
    slots, room = expert_slots(torch.full((500, 1), 3), num_experts=6)
    assert room >= 500
    assert slots.tolist() == list(range(3 * room, 3 * room + 500))


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
