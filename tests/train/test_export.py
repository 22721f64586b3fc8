"""Export: the bytes in the released layout, and the way back."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the training half needs torch (pip install 'twoends[train]')")

from safetensors.torch import load_file  # noqa: E402

from tests.train.models import tiny_architecture  # noqa: E402
from twoends.checkpoint import mxfp4  # noqa: E402
from twoends.checkpoint.config import read_config  # noqa: E402
from twoends.errors import CheckpointError  # noqa: E402
from twoends.train.bpe import byte_order, read_rank_file  # noqa: E402
from twoends.train.export import architecture, export_checkpoint, load_checkpoint, model_config  # noqa: E402
from twoends.train.model import KimiK3  # noqa: E402

RANKS = [*byte_order(), *(bytes([a, b]) for a in b"abcdefgh" for b in b"abcdefghijk")]


def _trained_looking_model() -> KimiK3:
    """Every tensor off its initial value, so that a tensor that isn't carried over shows."""
    model = KimiK3(tiny_architecture()).initialise(1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.add_(torch.randn(tensor.shape, generator=generator), alpha=0.05)
    return model.eval()


@pytest.fixture
def exported(tmp_path: Path) -> tuple[KimiK3, Path]:
    model = _trained_looking_model()
    export_checkpoint(model, tmp_path / "out", ranks=RANKS)
    return model, tmp_path / "out"


def test_experts_are_the_bytes_of_the_last_forward_pass(exported: tuple[KimiK3, Path]) -> None:
    model, folder = exported
    bank = model.model.layers[2].block_sparse_moe.experts
    stored = load_file(folder / "model-00003-of-000008.safetensors")
    prefix = "language_model.model.layers.2.block_sparse_moe.experts.4.w2"
    decoded = mxfp4.decode(
        stored[f"{prefix}.weight_packed"].numpy(), stored[f"{prefix}.weight_scale"].numpy()
    )
    np.testing.assert_array_equal(decoded, bank.quantise(bank.w2)[4].detach().numpy())


def test_a_reloaded_model_gives_the_logits_of_the_rounded_one(exported: tuple[KimiK3, Path]) -> None:
    model, folder = exported
    kept = ("A_log", "dt_bias", "conv1d", "o_norm", "e_score_correction_bias", ".experts.w")
    with torch.no_grad():
        for name, tensor in (dict(model.named_parameters()) | dict(model.named_buffers())).items():
            if not any(part in name for part in kept):
                tensor.copy_(tensor.bfloat16().float())
        ids = torch.arange(30)[None] * 17 % 600
        assert torch.equal(load_checkpoint(folder).eval()(ids), model(ids))


def test_small_sensitive_tensors_stay_f32_and_the_rest_is_bf16(exported: tuple[KimiK3, Path]) -> None:
    stored = load_file(exported[1] / "model-00002-of-000008.safetensors")
    wide = {name.rsplit("layers.1.", 1)[1] for name, t in stored.items() if t.dtype == torch.float32}
    convs = {f"self_attn.{x}_conv1d.weight" for x in "qkv"}
    small = {"self_attn.A_log", "self_attn.dt_bias", "self_attn.o_norm.weight"}
    assert wide == convs | small | {"block_sparse_moe.gate.e_score_correction_bias"}


def test_a_log_is_padded_with_zeros_to_the_head_dimension(exported: tuple[KimiK3, Path]) -> None:
    model, folder = exported
    stored = load_file(folder / "model-00001-of-000008.safetensors")[
        "language_model.model.layers.0.self_attn.A_log"
    ]
    assert torch.equal(stored[:3], model.model.layers[0].self_attn.A_log)
    assert stored.tolist()[3:] == [0.0] * 5


def test_there_is_one_file_per_layer_and_one_for_the_top(exported: tuple[KimiK3, Path]) -> None:
    index = json.loads((exported[1] / "model.safetensors.index.json").read_text())["weight_map"]
    places = {
        name.split("layers.")[1].split(".")[0]: file for name, file in index.items() if "layers." in name
    }
    assert places == {str(n): f"model-{n + 1:05d}-of-000008.safetensors" for n in range(7)}
    assert index["language_model.lm_head.weight"] == "model-00008-of-000008.safetensors"


def test_the_header_has_no_metadata_and_trunk_bytes_come_before_experts(
    exported: tuple[KimiK3, Path],
) -> None:
    raw = (exported[1] / "model-00005-of-000008.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    sizes = [{"F32": 4, "BF16": 2, "U8": 1}[entry["dtype"]] for entry in header.values()]
    assert length % 8 == 0
    assert "__metadata__" not in header
    assert sizes == sorted(sizes, reverse=True)


def test_the_config_reads_back_as_the_same_architecture(exported: tuple[KimiK3, Path]) -> None:
    assert architecture(read_config(exported[1])) == tiny_architecture()


def test_the_tokenizer_files_name_the_specials_behind_the_ranks(exported: tuple[KimiK3, Path]) -> None:
    folder = exported[1]
    added = json.loads((folder / "tokenizer_config.json").read_text())["added_tokens_decoder"]
    assert read_rank_file(folder / "tiktoken.model") == RANKS
    assert added["344"]["content"] == "[BOS]"
    assert added["599"]["content"] == "[PAD]"
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation == {"max_length": 1048576, "eos_token_id": 345}


def test_a_weight_that_is_not_finite_is_not_exported(tmp_path: Path) -> None:
    model = _trained_looking_model()
    with torch.no_grad():
        model.lm_head.weight[3, 5] = torch.nan
    with pytest.raises(CheckpointError, match=r"lm_head\.weight holds a value that isn't finite"):
        export_checkpoint(model, tmp_path, ranks=RANKS)


def test_a_model_without_a_part_of_k3_is_refused_by_name() -> None:
    import dataclasses

    config = dataclasses.replace(model_config(tiny_architecture()), attnres_block=None)
    with pytest.raises(CheckpointError, match="attn_res_block_size"):
        architecture(config)
