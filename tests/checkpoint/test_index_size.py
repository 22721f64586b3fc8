"""The index of a checkpoint of Kimi K3's true size: 497,220 tensors, in sparse files without weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from twoends.checkpoint.config import ModelConfig
from twoends.checkpoint.config_write import config_text
from twoends.checkpoint.layout import ShardPlan, TensorPlan, checkpoint_plans, layer_tensors, plan_shard
from twoends.checkpoint.presets import preset_config

NUM_TENSORS = 497_220
TOTAL_SIZE = 1_560_860_324_864
REPOSITORY = Path(__file__).resolve().parents[2]

# Opens the index in a fresh process and says what it cost. Resident size is in kilobytes.
PROBE = """
import json, sys, time, tracemalloc
from pathlib import Path
from twoends.checkpoint.config import read_config
from twoends.checkpoint.index import CheckpointIndex

def resident(name):
    return int(open("/proc/self/status").read().split(name + ":")[1].split()[0])

directory = Path(sys.argv[1])
config = read_config(directory)
before = resident("VmRSS")
if sys.argv[2] == "trace":
    tracemalloc.start()
start = time.perf_counter()
index = CheckpointIndex.open(directory, config)
open_s = time.perf_counter() - start
held, peak = tracemalloc.get_traced_memory()
print(json.dumps({
    "open_s": open_s, "held": held, "peak": peak, "grown": 1024 * (resident("VmRSS") - before),
    "high": 1024 * (resident("VmHWM") - before), "num_tensors": index.num_tensors,
    "total_bytes": index.total_bytes, "vision": index.vision_tensors, "trunk": index.trunk_bytes,
    "expert": [s.offset for s in index.expert(1, 0)], "nbytes": index.nbytes,
}))
"""


def released_plans(config: ModelConfig) -> list[tuple[str, bytes, int]]:
    """(file name, header, file bytes) of all 96 shards; layers that differ by number share a plan."""
    found: list[tuple[str, bytes, int]] = []
    plans: dict[tuple[bool, bool, int], tuple[int, ShardPlan]] = {}
    for layer in range(93):
        key = (config.is_mla(layer), config.is_moe(layer), len(str(layer)))
        if key not in plans:
            plans[key] = (layer, plan_shard("x", layer_tensors(config, layer, "mxfp4")))
        first, plan = plans[key]
        header = plan.header.replace(b".layers.%d." % first, b".layers.%d." % layer)
        found.append((f"model-{layer + 1:05d}-of-000096.safetensors", header, plan.file_bytes))
    *_, top = checkpoint_plans(preset_config("layer", num_layers=2), "mxfp4")
    found.append(("model-00094-of-000096.safetensors", top.header, top.file_bytes))
    vision = [
        TensorPlan(name=f"vision_tower.{i}", dtype="BF16", shape=(1,) if i else (447_358_809,))
        for i in range(165)
    ]
    projector = [TensorPlan(name=f"mm_projector.{i}", dtype="BF16", shape=(1,)) for i in range(3)]
    for number, tensors in ((95, projector), (96, vision)):
        plan = plan_shard(f"model-{number:05d}-of-000096.safetensors", tensors)
        found.append((plan.file_name, plan.header, plan.file_bytes))
    return found


@pytest.fixture(scope="module")
def true_size(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the released headers, sizes and index, and no weights."""
    directory = tmp_path_factory.mktemp("k3")
    config = preset_config("layer", num_layers=93)
    (directory / "config.json").write_text(config_text(config, expert_format="mxfp4"))
    with (directory / "model.safetensors.index.json").open("w") as index:
        index.write(f'{{"metadata": {{"total_size": {TOTAL_SIZE}}}, "weight_map": {{\n')
        separator = ""
        for file_name, header, file_bytes in released_plans(config):
            (directory / file_name).write_bytes(header)
            os.truncate(directory / file_name, file_bytes)
            names = json.loads(header[8:])
            index.write(separator + ",\n".join(f'"{name}": "{file_name}"' for name in names))
            separator = ",\n"
        index.write("\n}}\n")
    return directory


def probe(directory: Path, cache: Path, mode: str) -> dict[str, float]:
    environment = os.environ | {"XDG_CACHE_HOME": str(cache), "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-c", PROBE, str(directory), mode]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.full("half a minute of headers")
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc for resident sizes")
def test_half_a_million_tensors_cost_under_ten_megabytes(true_size: Path, tmp_path: Path) -> None:
    built = probe(true_size, tmp_path / "cache", "time")
    kept = probe(true_size, tmp_path / "cache", "trace")
    print(f"built in {built['open_s']:.2f} s, kept index opened in {kept['open_s']:.3f} s: {built} {kept}")
    for found in (built, kept):
        assert (found["num_tensors"], found["total_bytes"], found["vision"]) == (NUM_TENSORS, TOTAL_SIZE, 168)
        assert found["trunk"] == 108_811_877_376 + 4_697_663_488 - 163_840 * 7168 * 2
        assert found["expert"][0] == 1_268_562_960
        assert found["nbytes"] < 6e6
    # Building holds one shard's header as objects (about 10 MB) beside the tables (5 MB), then frees it.
    assert built["high"] < 40e6
    assert kept["held"] < 10e6
    assert kept["peak"] < 10e6
