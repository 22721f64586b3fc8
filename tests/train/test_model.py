"""The PyTorch module against logits of the official layer classes, and the promises of its parts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the training half needs torch (pip install 'twoends[train]')")

from tests.train.models import golden_model, tiny_architecture  # noqa: E402
from twoends.train.attnres import DepthMix, DepthQuery, NormedMix  # noqa: E402
from twoends.train.layers import RMSNorm, SituGlu  # noqa: E402
from twoends.train.model import KimiK3  # noqa: E402

GOLDEN = Path(__file__).parents[3] / "shared" / "data" / "golden" / "tiny_golden.json"


@pytest.mark.skipif(not GOLDEN.is_file(), reason=f"no {GOLDEN}")
def test_logits_are_those_of_the_official_layers_in_binary64() -> None:
    golden = json.loads(GOLDEN.read_text())["golden"]["k3_latent_eps_1e-06"]
    model = golden_model(
        tiny_architecture(vocab_size=64, moe_intermediate_size=20, routed_expert_hidden_size=16)
    )
    with torch.no_grad():
        logits = model(torch.tensor([golden["ids"]]))[0].numpy()
    # Both sides are binary64 and the largest logit is 8; the tile form only reorders sums.
    np.testing.assert_allclose(logits, np.asarray(golden["logits"]), rtol=0, atol=1e-11)


def test_logits_of_a_prefix_do_not_depend_on_what_follows() -> None:
    model = golden_model(tiny_architecture())
    ids = torch.arange(40)[None] * 7 % 600
    with torch.no_grad():
        whole, prefix = model(ids)[:, :23], model(ids[:, :23])
    # Binary64; matrix products of other heights may add in another order.
    torch.testing.assert_close(whole, prefix, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("gate", "up", "value"),
    [
        (1, 1, 0.7158178280748404),
        (-1, 1, -0.26333466257272786),
        (2, -3, -4.861066551249867),
        (-8, 50, -0.031165736713440514),
        (1000, 1000, 100),
    ],
)
def test_situ_glu_gives_the_published_value(gate: float, up: float, value: float) -> None:
    found = SituGlu((4.0, 25.0))(torch.tensor([gate, up], dtype=torch.float64))
    assert found.item() == pytest.approx(value, rel=1e-14)


def test_depth_mix_gives_the_published_vector() -> None:
    norm, query = RMSNorm(4, eps=1e-5).double(), DepthQuery(4).double()
    with torch.no_grad():
        query.weight.copy_(torch.tensor([[0.5, -0.25, 0.125, 1]]))
    sources = [torch.tensor(v, dtype=torch.float64) for v in ([1, 2, 3, 4], [4, 3, 2, 1], [0, 1, 0, -1])]
    wanted = [1.9606356353385694, 2.305242550557003, 2.604941482107875, 2.9046404136587474]
    assert DepthMix()(sources, norm, query).tolist() == pytest.approx(wanted, rel=1e-14)


def test_a_zero_query_mixes_to_the_plain_mean() -> None:
    sources = [torch.randn(2, 3, 8) for _ in range(3)]
    mixed = DepthMix()(sources, RMSNorm(8, eps=1e-5), DepthQuery(8))
    torch.testing.assert_close(mixed, torch.stack(sources).mean(0))


def test_the_mix_of_one_source_is_that_source_whatever_the_query() -> None:
    query = DepthQuery(8)
    torch.nn.init.normal_(query.weight)
    source = torch.randn(2, 3, 8)
    assert torch.equal(DepthMix()([source], RMSNorm(8, eps=1e-5), query), source)


@pytest.mark.parametrize("added", [None, torch.float32, torch.bfloat16], ids=str)
def test_a_sub_layer_reads_the_norm_of_the_mix_with_the_running_sum(added: torch.dtype | None) -> None:
    mix_norm, query, norm = RMSNorm(8, eps=1e-5), DepthQuery(8), RMSNorm(8, eps=1e-5)
    for weight in (mix_norm.weight, query.weight, norm.weight):
        torch.nn.init.normal_(weight)
    block, prefix = torch.randn(2, 2, 3, 8)
    more = None if added is None else torch.randn(2, 3, 8).to(added)
    total, x = NormedMix()([block], prefix, more, (mix_norm, query, norm))
    assert torch.equal(total, prefix if more is None else prefix + more.float())
    assert torch.equal(x, norm(DepthMix()([block, total], mix_norm, query)))


def test_every_parameter_gets_a_gradient() -> None:
    model = KimiK3(tiny_architecture()).initialise(3).train()
    for query in (m for m in model.modules() if isinstance(m, DepthQuery)):
        torch.nn.init.normal_(query.weight)
    ids = torch.arange(64).view(2, 32) * 11 % 600
    model.loss(ids[:, :-1], ids[:, 1:], ignore=-1).backward()
    # Layer 0 has nothing to mix before its attention: these two are in the release and never act.
    inert = {f"model.layers.0.self_attention_res_{part}.weight" for part in ("norm", "proj")}
    silent = {n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()}
    assert silent == inert


def test_the_same_seed_gives_the_same_weights() -> None:
    first, second = (KimiK3(tiny_architecture()).initialise(5).state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
