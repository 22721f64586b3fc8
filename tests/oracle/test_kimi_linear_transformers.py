"""Random Kimi-Linear checkpoints in transformers' own implementation and in the engine: the same logits.

Transformers reads the checkpoint as our writer left it: names, shapes, dtypes and config.json are under
test too. Its latent norm is built without an epsilon and gets 1e-6, as in the released code.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import warnings
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="this oracle needs torch (pip install 'twoends[oracle]')")
with warnings.catch_warnings():
    # What a foreign package warns about while it is imported is not about us.
    warnings.simplefilter("ignore")
    modeling = pytest.importorskip(
        "transformers.models.kimi_linear.modeling_kimi_linear",
        reason="this oracle needs transformers with Kimi-Linear (pip install 'twoends[oracle]')",
    )

from safetensors.torch import load_file, save_file  # noqa: E402

from tests.oracle.whole_model import WholeCheckpoint, binary64_logits  # noqa: E402
from tests.support.backends import native_isas  # noqa: E402
from tests.support.running import make_ops, plan_of  # noqa: E402
from twoends.checkpoint.presets import preset_config  # noqa: E402
from twoends.checkpoint.tiny import write_synthetic  # noqa: E402
from twoends.engine.open import Checkpoint, OpenModel  # noqa: E402

pytestmark = [
    # The release has this field, as null; transformers has a new name for it.
    pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated:FutureWarning"),
    pytest.mark.skipif(
        importlib.util.find_spec("fla") is not None,
        reason="with flash-linear-attention beside it, transformers wants a GPU",
    ),
]

ISAS = native_isas() or ["reference"]
LATENT_EPS = 1e-6
# Both sides in binary64 and logits of size 14: only the order of sums differs (found: 3e-14 to 1.3e-13).
BINARY64_BOUND = 1e-11
# Both sides in binary32, logits of standard deviation 2.2. Over eight checkpoints the two were up to 4.0e-5
# apart; from binary64 the engine was up to 1.5e-5 away, transformers 4.2e-5.
BINARY32_BOUND = 1e-4

NANO = preset_config("nano", family="kimi-linear")
SHAPES = {
    "nano": NANO,
    # the head sizes of the release, and a prompt longer than one chunk of transformers' KDA
    "released heads": dataclasses.replace(
        NANO, num_layers=5, mla_layers=(3, 4), hidden_size=256, num_heads=2, kv_lora_rank=512, nope_dim=128,
        rope_dim=64, value_dim=128, kda_num_heads=2, kda_head_dim=128, experts_per_token=8, num_experts=32,
    ),
    # every switch of the family that the release leaves alone
    "other switches": dataclasses.replace(
        NANO, num_layers=6, mla_layers=(0, 2, 5), num_dense_layers=2, q_lora_rank=40, num_shared_experts=3,
        renormalize=False, routed_scaling=1.3, conv_width=4, experts_per_token=1,
    ),
}  # fmt: skip
NUM_TOKENS = {"nano": 24, "released heads": 80, "other switches": 24}
CASES = [("nano", 1), ("nano", 2), ("nano", 3), ("released heads", 4), ("other switches", 5)]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def checkpoint(request, tmp_path_factory) -> tuple[Path, list[int]]:
    """A directory and a prompt for it."""
    shape, seed = request.param
    directory = tmp_path_factory.mktemp("kimi-linear")
    write_synthetic(directory, SHAPES[shape], seed=seed)
    ids = np.random.default_rng(seed).integers(0, SHAPES[shape].vocab_size, NUM_TOKENS[shape])
    return directory, ids.tolist()


def transformers_logits(directory: Path, ids: list[int], dtype) -> np.ndarray:
    """Logits of every position by transformers' plain PyTorch path; every tensor must find its place."""
    model, loading = modeling.KimiLinearForCausalLM.from_pretrained(
        directory,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
        local_files_only=True,
    )
    assert not any(loading.values()), loading
    with torch.no_grad():
        return model.eval().to(dtype)(torch.tensor([ids]), use_cache=False).logits[0].numpy()


class WideTorch:
    """The torch module as transformers' file sees it, but what it calls float32 is binary64."""

    float32 = torch.float64

    def __getattr__(self, name: str):
        return getattr(torch, name)


@pytest.fixture
def binary64_transformers(monkeypatch):
    """Widens the places where transformers' code narrows to binary32 whatever the model's type is."""
    monkeypatch.setattr(modeling, "torch", WideTorch())
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


def engine_logits(directory: Path, ids: list[int], isa: str, *, latent_eps: float = LATENT_EPS) -> np.ndarray:
    opened = Checkpoint.open(directory, latent_eps=latent_eps)
    model = OpenModel(opened, plan_of(opened, context=len(ids)), make_ops(isa), poison=True)
    try:
        return model.run_pass(ids, layer_done=lambda layer: None, all_rows=True)
    finally:
        model.close()


def test_our_model_in_binary64_is_transformers_in_binary64(checkpoint, binary64_transformers) -> None:
    directory, ids = checkpoint
    ours = binary64_logits(WholeCheckpoint(directory), ids)
    theirs = transformers_logits(directory, ids, torch.float64)
    assert theirs.dtype == np.float64
    assert np.abs(ours - theirs).max() <= BINARY64_BOUND


@pytest.mark.parametrize("isa", ISAS)
def test_the_engine_gives_the_logits_of_transformers_at_every_position(checkpoint, isa) -> None:
    directory, ids = checkpoint
    assert_agree(engine_logits(directory, ids, isa), transformers_logits(directory, ids, torch.float32))


def test_the_reference_kernels_give_them_too(nano_dirs) -> None:
    """On one checkpoint: they are slow, and the native ones have their bits (tests/kernels)."""
    directory, ids = nano_dirs["kimi-linear"], list(range(0, 480, 20))
    assert_agree(
        engine_logits(directory, ids, "reference"), transformers_logits(directory, ids, torch.float32)
    )


def assert_agree(ours: np.ndarray, theirs: np.ndarray) -> None:
    assert ours.argmax(axis=1).tolist() == theirs.argmax(axis=1).tolist()
    assert np.abs(ours - theirs).max() <= BINARY32_BOUND


def test_the_default_latent_epsilon_is_that_of_transformers(tmp_path: Path) -> None:
    """Latents of mean square 1.5e-5, where 1e-6 and 1e-5 are far apart."""
    write_synthetic(tmp_path, NANO, seed=6)
    (shard,) = tmp_path.glob("*.safetensors")
    tensors = load_file(shard)
    for name in tensors:
        if name.endswith("kv_a_proj_with_mqa.weight"):
            tensors[name] = tensors[name] * 2.0**-8
    save_file(tensors, shard, metadata={"format": "pt"})
    ids = list(range(0, 480, 20))
    theirs = transformers_logits(tmp_path, ids, torch.float32)
    assert Checkpoint.open(tmp_path).config.latent_eps == LATENT_EPS
    assert_agree(engine_logits(tmp_path, ids, ISAS[0]), theirs)
    other = engine_logits(tmp_path, ids, ISAS[0], latent_eps=1e-5)
    assert np.abs(other - theirs).max() > 100 * BINARY32_BOUND
