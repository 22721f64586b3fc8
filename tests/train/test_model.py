"""The PyTorch module against logits of the official layer classes, and the promises of its parts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the training half needs torch (pip install 'twoends[train]')")

from tests.train.conftest import fill_golden  # noqa: E402
from twoends.train.architecture import Architecture  # noqa: E402
from twoends.train.model import KimiK3  # noqa: E402

GOLDEN = Path(__file__).parents[3] / "shared" / "data" / "golden" / "tiny_golden.json"


@pytest.mark.skipif(not GOLDEN.is_file(), reason=f"no {GOLDEN}")
def test_logits_are_those_of_the_official_layers_in_binary64(tiny: Callable[..., Architecture]) -> None:
    golden = json.loads(GOLDEN.read_text())["golden"]["k3_latent_eps_1e-06"]
    arch = tiny(
        vocab_size=64, moe_intermediate_size=20, routed_expert_hidden_size=16, full_attn_layers=(3, 5, 6)
    )
    model = fill_golden(KimiK3(arch)).eval()
    with torch.no_grad():
        logits = model(torch.tensor([golden["ids"]]))[0].numpy()
    # Both sides are binary64; the largest logit is 8, the chunk form reorders sums.
    np.testing.assert_allclose(logits, np.asarray(golden["logits"]), rtol=0, atol=1e-11)
