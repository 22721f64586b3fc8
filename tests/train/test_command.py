"""`twoends train` as a user meets it, on a recipe that takes seconds."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the training half needs torch (pip install 'twoends[train]')")
pytest.importorskip("tokenizers", reason="the vocabulary trainer is in the train extra")

RECIPE = """
[model]
hidden_size = 32
num_hidden_layers = 4
intermediate_size = 32
first_k_dense_replace = 1
num_attention_heads = 2
q_lora_rank = 16
kv_lora_rank = 16
qk_nope_head_dim = 8
qk_rope_head_dim = 8
v_head_dim = 16
kda_num_heads = 2
kda_head_dim = 16
short_conv_kernel_size = 4
gate_lower_bound = -5.0
full_attn_layers = [3]
num_experts = 4
num_experts_per_token = 2
num_shared_experts = 1
moe_intermediate_size = 32
routed_expert_hidden_size = 32
routed_scaling_factor = 1.0
activation_situ_beta = 4.0
activation_situ_linear_beta = 25.0
attn_res_block_size = 2
rms_norm_eps = 1e-5
[tokenizer]
num_ranks = 400
sample_characters = 40000
file = ""
[data]
stories = 120
echoes = 1
tasks = 120
characters = 60000
[data.shares]
stories = 0.8
tasks = 0.2
[train]
seed = 1
steps = %d
batch_rows = 2
micro_rows = 2
row_tokens = 48
optimiser = "per-head-muon"
learning_rate = 3e-3
final_learning_rate = 1e-4
warmup_share = 0.01
weight_decay = 0.1
beta1 = 0.9
beta2 = 0.95
momentum = 0.95
qk_clip = 100.0
clip_norm = 1.0
balance = "quantile"
router_bias_keep = 0.5
sign_rate = 1e-3
auxiliary_weight = 0.01
expert_weights = "mxfp4"
expert_activations = "none"
pack_documents = true
recompute = false
mtp = false
matmul_dtype = "float32"
compile = false
snapshot_minutes = 60.0
prompts = ["Once upon a time"]
"""
PROGRAM = "from twoends.cli.main import main; raise SystemExit(main())"


def _words(*options: str) -> list[str]:
    return [sys.executable, "-c", PROGRAM, "train", *options]


def _train(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(_words(*options), capture_output=True, text=True, timeout=100, check=False)


def _recipe(folder: Path, *, steps: int) -> str:
    path = folder / "tiny.toml"
    path.write_text(RECIPE % steps)
    return str(path)


def test_a_recipe_becomes_a_checkpoint_that_the_checkpoint_reader_accepts(tmp_path: Path) -> None:
    from twoends.checkpoint.config import read_config

    out = tmp_path / "run"
    done = _train(_recipe(tmp_path, steps=3), "--out", str(out), "--threads", "1", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["steps"], found["tokens"], found["complete"]) == (3, 288, True)
    assert read_config(out / "checkpoint").vocab_size == 656
    assert found["heldout_bits_per_byte"] == found["heldout_bits_per_byte_as_stored"]
    report = (out / "report.html").read_text()
    assert all(words in report for words in ("GFLOP/s", "Once upon a time", "max violation"))
    assert report.count("<svg") >= 5
    assert "http" not in report.replace("http://www.w3.org/2000/svg", "")
    assert len(list((out / "events").iterdir())) == 1
    (sample,) = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    assert (sample["step"], sample["samples"][0]["prompt"]) == (3, "Once upon a time")


def test_ctrl_c_keeps_a_snapshot_and_says_how_to_go_on(tmp_path: Path) -> None:
    recipe, out = _recipe(tmp_path, steps=1_000_000), tmp_path / "run"
    words = _words(recipe, "--out", str(out), "--threads", "1")
    running = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 90
    assert running.stderr is not None
    for line in running.stderr:
        if "million parameters" in line or time.monotonic() > deadline:
            break
    time.sleep(1)
    running.send_signal(signal.SIGINT)
    stdout, stderr = running.communicate(timeout=60)
    assert running.returncode == 0, stderr
    assert f"twoends train {recipe} --out {out} --resume" in stdout
    assert list(out.glob("snapshots/step-*/whole.json"))
    assert not (out / "checkpoint").exists()


def test_a_finished_part_is_not_trained_over_by_mistake(tmp_path: Path) -> None:
    recipe, out = _recipe(tmp_path, steps=1), tmp_path / "run"
    assert _train(recipe, "--out", str(out), "--threads", "1").returncode == 0
    again = _train(recipe, "--out", str(out), "--threads", "1")
    assert again.returncode == 2
    assert "add --resume" in again.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--preset", "nano"], "needs --out"),
        (["--preset", "nano", "--out", "x", "--minutes", "0"], "--minutes is 0"),
        (["none.toml", "--out", "x"], "no recipe at none.toml"),
        (["--ablation", "--out", "x", "--resume"], "leave --resume out"),
        (["--preset", "nano", "--out", "x", "--cells", "muon"], "belongs to --ablation"),
        (["none.toml", "--preset", "nano", "--out", "x"], "give one of them"),
        (["--out", "x", "--stepps", "4"], "nearest known name"),
    ],
)
def test_a_wrong_call_ends_with_code_2_and_a_reason(options: list[str], message: str) -> None:
    done = _train(*options)
    assert done.returncode == 2
    assert message in done.stderr
