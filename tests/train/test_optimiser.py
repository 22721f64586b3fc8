"""The optimiser: who moves by which rule, what survives a save, and shards against whole tensors."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the training half needs torch (pip install 'twoends[train]')")

import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402

from tests.train.models import tiny_architecture  # noqa: E402
from twoends.errors import OptionError  # noqa: E402
from twoends.train.balance import rebalance  # noqa: E402
from twoends.train.model import KimiK3  # noqa: E402
from twoends.train.optimiser import (  # noqa: E402
    OPTIMISERS,
    MuonAdamW,
    learning_rate_at,
    make_optimiser,
    parameter_groups,
)
from twoends.train.qk_clip import clip_attention  # noqa: E402


def _model() -> KimiK3:
    return KimiK3(tiny_architecture()).initialise(3).train()


def _optimiser(model: KimiK3, kind: str = "per-head-muon") -> MuonAdamW:
    return make_optimiser(model, kind=kind, learning_rate=1e-2, weight_decay=0.1, beta1=0.9, beta2=0.95)


def _take_steps(model: KimiK3, optimiser: MuonAdamW, steps: range) -> None:
    for step in steps:
        ids = torch.randint(0, 600, (2, 20), generator=torch.Generator().manual_seed(step))
        model.loss(ids[:, :-1], ids[:, 1:], ignore=-1).backward()
        optimiser.step()
        optimiser.zero_grad()


def _rule_of_each(kind: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    model = _model()
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = parameter_groups(model, kind=kind, weight_decay=0.1)
    return {names[p]: (g["rule"], g["head_rows"]) for g in groups for p in g["params"]}


def test_queries_keys_and_values_are_split_by_heads_and_other_matrices_are_whole() -> None:
    rules = _rule_of_each("per-head-muon")
    assert rules["model.layers.0.self_attn.k_proj.weight"] == ("muon", (8,))
    assert rules["model.layers.3.self_attn.q_b_proj.weight"] == ("muon", (12,))
    assert rules["model.layers.3.self_attn.kv_b_proj.weight"] == ("muon", (8, 8))
    assert rules["model.layers.0.self_attn.o_proj.weight"] == ("muon", ())
    assert rules["model.layers.1.block_sparse_moe.experts.w2"] == ("muon", ())
    assert _rule_of_each("muon")["model.layers.0.self_attn.k_proj.weight"] == ("muon", ())


@pytest.mark.parametrize(
    "part",
    ["embed_tokens", "lm_head", "norm", "gate.weight", "conv1d", "A_log", "dt_bias", "res_proj"],
)
def test_adamw_keeps_what_is_no_plain_matrix(part: str) -> None:
    rules = {name: rule for name, (rule, _) in _rule_of_each("per-head-muon").items() if part in name}
    assert rules
    assert set(rules.values()) == {"adamw"}


@pytest.mark.parametrize("kind", OPTIMISERS)
def test_every_parameter_is_in_one_group(kind: str) -> None:
    groups = parameter_groups(_model(), kind=kind, weight_decay=0.1)
    members = [id(p) for group in groups for p in group["params"]]
    assert sorted(members) == sorted(id(p) for p in _model_parameters_of(groups))
    assert len(members) == len(list(_model().parameters()))


def _model_parameters_of(groups: list[dict[str, object]]) -> set[torch.nn.Parameter]:
    return {p for group in groups for p in group["params"]}  # type: ignore[attr-defined]


def test_adamw_has_the_bits_of_torch() -> None:
    ours, theirs = _model(), _model()
    groups = parameter_groups(theirs, kind="adamw", weight_decay=0.1)
    plain = [{"params": g["params"], "weight_decay": g["weight_decay"]} for g in groups]
    reference = torch.optim.AdamW(plain, lr=1e-2, betas=(0.9, 0.95), eps=1e-10, fused=True)
    _take_steps(ours, _optimiser(ours, "adamw"), range(3))
    _take_steps(theirs, reference, range(3))  # type: ignore[arg-type]
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


@pytest.mark.parametrize("kind", OPTIMISERS)
def test_a_saved_state_continues_with_the_bits_of_a_straight_run(kind: str, tmp_path: Path) -> None:
    straight = _model()
    _take_steps(straight, _optimiser(straight, kind), range(4))
    first = _model()
    optimiser = _optimiser(first, kind)
    _take_steps(first, optimiser, range(2))
    torch.save((first.state_dict(), optimiser.state_dict()), tmp_path / "state.pt")
    second = _model()
    weights, state = torch.load(tmp_path / "state.pt", weights_only=True)
    second.load_state_dict(weights)
    resumed = _optimiser(second, kind)
    resumed.load_state_dict(state)
    _take_steps(second, resumed, range(2, 4))
    assert all(torch.equal(a, b) for a, b in zip(straight.parameters(), second.parameters(), strict=True))


def test_an_unknown_optimiser_is_refused_with_the_known_ones() -> None:
    with pytest.raises(OptionError, match="no optimiser 'adam'; there is per-head-muon, muon, adamw"):
        _optimiser(_model(), "adam")


@pytest.mark.parametrize(
    ("step", "rate"), [(0, 1e-3), (9, 1e-2), (10, 1e-2), (505, 5.5e-3), (1000, 1e-3), (2000, 1e-3)]
)
def test_one_percent_of_warm_up_then_half_a_cosine(step: int, rate: float) -> None:
    assert learning_rate_at(step, steps=1000, peak=1e-2, final=1e-3) == pytest.approx(rate)


def _shard_worker(rank: int, ranks: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (ranks,))
    model = _model()
    # 3 heads over 2 ranks don't fall on a shard's border, experts and the heads of one rank do.
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    _take_steps(model, _optimiser(model), range(3))
    whole = {name: p.full_tensor() for name, p in model.named_parameters()}
    ids = torch.arange(40)[None] * (13 + rank) % 600
    found = {"steps": whole, **_count_and_clip(model, ids, dist.group.WORLD)}
    if rank == 0:
        torch.save(found, Path(folder) / "sharded.pt")
    dist.destroy_process_group()


def _count_and_clip(model: KimiK3, ids: torch.Tensor, group: object) -> dict[str, object]:
    """Biases and clipped weights of a model whose queries are too large, from a pass over `ids`."""
    with torch.no_grad():
        for router in model.routers():
            router.take_counts()
            router.e_score_correction_bias.zero_()
        for layer in model.model.layers:
            if hasattr(layer.self_attn, "q_b_proj"):
                layer.self_attn.q_b_proj.weight.mul_(300)
                layer.self_attn.forget_logits()
        model(ids)
    largest = clip_attention(model, group=group)  # type: ignore[arg-type]
    rebalance(model.routers(), method="quantile", group=group)  # type: ignore[arg-type]
    weight = model.model.layers[3].self_attn.q_b_proj.weight.detach()
    whole = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
    return {
        "largest": largest,
        "clipped": whole,
        "bias": torch.stack([r.e_score_correction_bias for r in model.routers()]),
    }


@pytest.fixture(scope="module")
def of_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What two ranks made of the model: weights after steps, then counts and clipping over different rows."""
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(_shard_worker, args=(2, port, str(folder)), nprocs=2)
    found: dict[str, Any] = torch.load(folder / "sharded.pt", weights_only=True)
    return found


def _whole() -> KimiK3:
    model = _model()
    _take_steps(model, _optimiser(model), range(3))
    return model


def test_shards_of_two_ranks_move_as_the_whole_does(of_two_ranks: dict[str, Any]) -> None:
    for name, parameter in _whole().named_parameters():
        # Both ranks see the same rows, so gradients are equal but for the halving and doubling of the mean.
        found = of_two_ranks["steps"][name]
        torch.testing.assert_close(found, parameter.detach(), rtol=1e-4, atol=1e-5, msg=name)


def test_ranks_count_and_clip_what_all_of_them_saw(of_two_ranks: dict[str, Any]) -> None:
    rows = torch.arange(40)[None] * torch.tensor([[13], [14]]) % 600
    wanted = _count_and_clip(_whole(), rows, None)
    assert of_two_ranks["largest"] == pytest.approx(wanted["largest"], rel=1e-3)
    torch.testing.assert_close(of_two_ranks["clipped"], wanted["clipped"], rtol=1e-2, atol=1e-3)
    # A margin may fall into the next bin, which is 2 / 1000 wide under a bias of zero.
    torch.testing.assert_close(of_two_ranks["bias"], wanted["bias"], rtol=0, atol=4e-3)
