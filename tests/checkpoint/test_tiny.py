"""Synthetic checkpoints: valid, repeatable, and with the statistics of trained weights."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from tests.checkpoint.handmade_shards import unpack
from twoends.checkpoint import mxfp4
from twoends.checkpoint.config import read_config
from twoends.checkpoint.index import CheckpointIndex
from twoends.checkpoint.names import expert_prefix
from twoends.checkpoint.presets import preset_config
from twoends.checkpoint.synthetic import to_bf16
from twoends.checkpoint.tiny import write_tiny
from twoends.checkpoint.tiny_vocab import tokenizer_config, tokens
from twoends.errors import DoesNotFit, OptionError

MOE = "language_model.model.layers.5.block_sparse_moe"


def floats(tensor: tuple[str, list[int], bytes]) -> np.ndarray:
    dtype, shape, data = tensor
    words = np.frombuffer(data, np.uint32 if dtype == "F32" else np.uint16)
    bits = words if dtype == "F32" else words.astype(np.uint32) << 16
    return bits.view(np.float32).reshape(shape)


def all_tensors(directory: Path) -> dict[str, tuple[str, list[int], bytes]]:
    found = {}
    for path in sorted(directory.glob("*.safetensors")):
        found |= unpack(path)
    return found


@pytest.mark.parametrize("fixture", ["nano_k3", "nano_kimi_linear"])
def test_a_written_checkpoint_opens(fixture: str, request: pytest.FixtureRequest) -> None:
    directory = request.getfixturevalue(fixture)
    config = read_config(directory)
    assert config == preset_config("nano", family=config.family)
    assert CheckpointIndex.open(directory, config).num_tensors > 500


def test_equal_seeds_give_equal_bytes_and_other_seeds_others(tmp_path: Path, nano_k3: Path) -> None:
    for seed in (0, 1):
        write_tiny(tmp_path / str(seed), preset="nano", seed=seed)
    digests = [
        {p.name: hashlib.blake2b(p.read_bytes()).hexdigest() for p in directory.iterdir()}
        for directory in (nano_k3, tmp_path / "0", tmp_path / "1")
    ]
    assert digests[0] == digests[1]
    assert all(
        (digests[0][name] != digest) == name.startswith("model-") for name, digest in digests[2].items()
    )


def test_a_tensor_does_not_depend_on_the_number_of_layers(tmp_path: Path, nano_k3: Path) -> None:
    write_tiny(tmp_path / "short", preset="nano", num_layers=6)
    short, long = all_tensors(tmp_path / "short"), all_tensors(nano_k3)
    assert short[f"{MOE}.gate.weight"] == long[f"{MOE}.gate.weight"]


def test_every_value_is_finite(nano_k3: Path, nano_kimi_linear: Path) -> None:
    for directory in (nano_k3, nano_kimi_linear):
        for name, tensor in all_tensors(directory).items():
            if tensor[0] != "U8":
                assert np.isfinite(floats(tensor)).all(), name


def test_padded_a_log_entries_are_exactly_zero(nano_k3: Path) -> None:
    a_log = floats(all_tensors(nano_k3)["language_model.model.layers.5.self_attn.A_log"])
    assert a_log.shape == (24,)
    assert a_log[:5].all()
    assert not a_log[5:].any()


def test_experts_have_the_code_shares_of_the_release(nano_k3: Path) -> None:
    tensors = all_tensors(nano_k3)
    packed = np.concatenate(
        [np.frombuffer(t[2], np.uint8) for name, t in tensors.items() if name.endswith("_packed")]
    )
    codes = np.concatenate([packed & 15, packed >> 4])
    shares = np.bincount(codes & 7, minlength=8) / codes.size
    # Counted in 229,376 released codes; the bound is four standard errors of the rarest draw here.
    assert np.allclose(shares, [0.1159, 0.2212, 0.1917, 0.1526, 0.1531, 0.1047, 0.0506, 0.0103], atol=0.002)
    assert abs(np.mean(codes >> 3) - 0.5) < 0.002


def test_experts_keep_the_scale_of_their_input(nano_k3: Path) -> None:
    config = read_config(nano_k3)
    tensors = all_tensors(nano_k3)
    prefix = expert_prefix(config, 5, 3)
    packed, scale = (
        np.frombuffer(t[2], np.uint8).reshape(t[1])
        for t in (tensors[f"{prefix}w1.weight_packed"], tensors[f"{prefix}w1.weight_scale"])
    )
    rms = float(np.sqrt(np.mean(mxfp4.decode(packed, scale) ** 2)))
    # Gain one means 1 / sqrt(64) = 0.125; scale bytes are powers of two, so a factor of 1.3 either way.
    assert 0.125 / 1.3 < rms < 0.125 * 1.3


def test_router_biases_have_mean_zero(nano_k3: Path) -> None:
    bias = floats(all_tensors(nano_k3)[f"{MOE}.gate.e_score_correction_bias"])
    assert abs(float(bias.astype(np.float64).mean())) < 1e-8
    assert bias.std() > 0.01


def test_sparse_experts_are_holes_that_decode_to_zeros(tmp_path: Path) -> None:
    config = write_tiny(tmp_path, preset="nano", sparse=True)
    tensors = all_tensors(tmp_path)
    prefix = expert_prefix(config, 5, 3)
    assert not any(tensors[f"{prefix}w2.weight_packed"][2])
    assert floats(tensors[f"{MOE}.gate.weight"]).any()
    CheckpointIndex.open(tmp_path, config)


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    write_tiny(tmp_path, preset="nano", progress=lambda done, total: calls.append((done, total)))
    assert calls[-1][0] == calls[-1][1]
    assert calls == sorted(calls)


def test_the_layer_preset_has_true_dimensions_and_refuses_a_small_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = preset_config("layer", num_layers=3)
    assert (config.hidden_size, config.num_experts, config.mla_layers) == (7168, 896, (2,))
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 10**9}))
    with pytest.raises(DoesNotFit, match=r"the disk has 1\.00 GB free"):
        write_tiny(tmp_path, preset="layer", num_layers=3, sparse=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preset": "huge"}, "no preset 'huge'"),
        ({"family": "llama"}, "no family 'llama'"),
        ({"num_layers": 1}, "has 2 to 4096 layers, not 1"),
        ({"preset": "layer", "family": "kimi-linear"}, "exists for kimi-k3 only"),
    ],
)
def test_what_can_not_be_written_is_refused(tmp_path: Path, options: dict, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        write_tiny(tmp_path, **options)


def test_a_checkpoint_is_never_written_over(tmp_path: Path) -> None:
    write_tiny(tmp_path, preset="nano")
    with pytest.raises(OptionError, match="already has a checkpoint"):
        write_tiny(tmp_path, preset="nano", seed=1)


@pytest.mark.parametrize("num_ranks", [256, 257, 512, 7936])
def test_a_rank_file_has_all_bytes_first_and_prefixes_before_words(num_ranks: int) -> None:
    found = tokens(num_ranks)
    assert len(set(found)) == num_ranks
    assert sorted(found[:256]) == [bytes([byte]) for byte in range(256)]
    assert (found[0], found[3]) == (b"!", b"$")
    ranks = {token: rank for rank, token in enumerate(found)}
    assert all(ranks[token[:-1]] < rank for token, rank in ranks.items() if len(token) > 1)


def test_the_largest_vocabulary_can_be_filled() -> None:
    assert len(tokens(163_840 - 256)) == 163_584


def test_the_rank_file_is_in_the_release_form(nano_k3: Path) -> None:
    lines = (nano_k3 / "tiktoken.model").read_text().splitlines()
    assert len(lines) == 512
    for rank, line in enumerate(lines):
        encoded, number = line.split(" ")
        assert int(number) == rank
        assert base64.b64decode(encoded, validate=True)


def test_tokenizer_config_is_the_release_with_its_ids_moved(shared_data: Path) -> None:
    released = json.loads((shared_data / "kimi-k3" / "tokenizer_config.json").read_text())
    assert tokenizer_config(163_840) == released
    assert list(tokenizer_config(768)["added_tokens_decoder"])[:2] == ["512", "513"]


def test_generation_config_is_in_the_release_form(nano_k3: Path, shared_data: Path) -> None:
    released = (shared_data / "kimi-k3" / "generation_config.json").read_text()
    written = (nano_k3 / "generation_config.json").read_text()
    assert written == released.replace("163586", "514")


def test_rounding_to_bf16_goes_to_the_even_neighbour() -> None:
    values = np.array([1.0, 1.00390625, 1.01171875, -0.0, 1.0039064], dtype=np.float32)
    assert to_bf16(values).tolist() == [0x3F80, 0x3F80, 0x3F82, 0x8000, 0x3F81]
