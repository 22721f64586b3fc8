"""`twoends inspect`: what is there, and what is wrong."""

from __future__ import annotations

import json
import shutil

import pytest


def test_the_screen_to_the_letter(twoends, nano):
    result = twoends("inspect", nano, "--sizes")
    fingerprint = json.loads(twoends("inspect", nano, "--json").out)["fingerprint"]
    assert (result.code, result.err) == (0, "")
    assert (
        result.out
        == f"""\
Kimi K3   9 layers (6 KDA, 3 MLA)
  directory     {nano}
  shards        10 files, all complete, 3.9 MB
  tensors       906, 3.8 MB; all that the config asks for
  trunk         2.5 MB
  experts       1.1 MB: 112 of 9.8 KB, MXFP4
  embedding     159.7 KB
  fingerprint   {fingerprint}

shards
  model-00001-of-000010.safetensors   23 tensors  271.8 KB
  model-00002-of-000010.safetensors  112 tensors  445.9 KB
  model-00003-of-000010.safetensors  112 tensors  445.9 KB
  model-00004-of-000010.safetensors  106 tensors  367.9 KB
  model-00005-of-000010.safetensors  112 tensors  445.9 KB
  model-00006-of-000010.safetensors  112 tensors  445.9 KB
  model-00007-of-000010.safetensors  112 tensors  445.9 KB
  model-00008-of-000010.safetensors  106 tensors  367.9 KB
  model-00009-of-000010.safetensors  106 tensors  367.9 KB
  model-00010-of-000010.safetensors    5 tensors  320.6 KB
"""
    )


def test_a_layer_lists_its_tensors(twoends, nano):
    lines = twoends("inspect", nano, "--layer", 3).out.splitlines()
    assert "layer 3 (MLA, 14 experts)" in lines
    assert "  kv_b_proj                BF16  144x36   10.4 KB" in lines


def test_the_config_lists_its_fields(twoends, nano):
    assert "  mla_layers          3 7 8" in twoends("inspect", nano, "--config").out.splitlines()


def test_a_layer_that_is_not_there_is_refused(twoends, nano):
    result = twoends("inspect", nano, "--layer", 9)
    assert (result.code, result.err) == (2, "twoends: --layer is 9; this model has layers 0 to 8.\n")


def test_the_parts_sum_to_the_whole(twoends, nano):
    found = json.loads(twoends("inspect", nano, "--json").out)
    parts = found["trunk_bytes"] + found["experts_bytes"] + found["embedding_bytes"] + found["vision_bytes"]
    assert parts == found["total_bytes"]


@pytest.mark.parametrize("fault", ["missing", "flipped", "no config"])
def test_a_fault_is_named_and_exits_2(twoends, nano, tmp_path, fault):
    copy = tmp_path / "copy"
    shutil.copytree(nano, copy)
    shard = copy / "model-00004-of-000010.safetensors"
    if fault == "missing":
        shard.unlink()
    elif fault == "flipped":
        data = bytearray(shard.read_bytes())
        data[20] ^= 0xFF
        shard.write_bytes(data)
    else:
        (copy / "config.json").unlink()
    result = twoends("inspect", copy)
    assert (result.code, result.out) == (2, "")
    assert ("config.json" if fault == "no config" else shard.name) in result.err.splitlines()[0]
