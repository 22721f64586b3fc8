"""QK-clip: logits are watched in training, and heads past the threshold are brought back to it."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the training half needs torch (pip install 'twoends[train]')")

from tests.train.models import tiny_architecture  # noqa: E402
from twoends.train.mla import GatedLatentAttention  # noqa: E402
from twoends.train.qk_clip import QK_THRESHOLD, clip_attention  # noqa: E402


def _layer(*, size: float) -> GatedLatentAttention:
    """One MLA layer whose head 1 has queries `size` times those of the others."""
    layer = GatedLatentAttention(tiny_architecture()).train()
    for number, module in enumerate(layer.children()):
        if hasattr(module, "reset_parameters"):
            module.reset_parameters(torch.Generator().manual_seed(number))
    with torch.no_grad():
        layer.q_b_proj.weight[12:24] *= size
    return layer


def _x() -> torch.Tensor:
    return torch.randn(2, 40, 32, generator=torch.Generator().manual_seed(9))


def test_the_threshold_is_k2s() -> None:
    assert QK_THRESHOLD == 100.0


def test_a_head_past_the_threshold_comes_back_to_it_and_others_stay() -> None:
    layer = _layer(size=200.0)
    layer(_x())
    before = layer.logit_max_H.clone()
    weights = layer.q_b_proj.weight.detach().clone(), layer.kv_b_proj.weight.detach().clone()
    assert clip_attention(layer) == pytest.approx(float(before.max()))
    layer(_x())
    assert float(before[1]) > 2 * QK_THRESHOLD
    assert float(layer.logit_max_H[1]) == pytest.approx(QK_THRESHOLD, rel=1e-4)
    for now, old, rows in ((layer.q_b_proj, weights[0], 12), (layer.kv_b_proj, weights[1], 16)):
        assert torch.equal(now.weight[:rows], old[:rows])
        assert torch.equal(now.weight[2 * rows :], old[2 * rows :])


def test_values_and_the_shared_key_are_left_alone() -> None:
    layer = _layer(size=200.0)
    layer(_x())
    values, shared = layer.kv_b_proj.weight[24:32].clone(), layer.kv_a_proj_with_mqa.weight.clone()
    clip_attention(layer)
    assert torch.equal(layer.kv_b_proj.weight[24:32], values)
    assert torch.equal(layer.kv_a_proj_with_mqa.weight, shared)


def test_below_the_threshold_nothing_moves_and_the_record_begins_anew() -> None:
    layer = _layer(size=1.0)
    layer(_x())
    weight = layer.q_b_proj.weight.detach().clone()
    assert clip_attention(layer) < QK_THRESHOLD
    assert torch.equal(layer.q_b_proj.weight, weight)
    assert clip_attention(layer) == float("-inf")


def test_evaluation_is_not_recorded() -> None:
    layer = _layer(size=200.0).eval()
    layer(_x())
    assert clip_attention(layer) == float("-inf")
