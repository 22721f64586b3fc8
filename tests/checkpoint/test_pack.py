"""Packs: every block stands for its source's bytes."""

from __future__ import annotations

import pytest

from tests.checkpoint.packs import SMALL_BLOCKS, reopen, verify
from tests.support.checkpoints import open_index
from twoends.checkpoint.pack_index import layers_of
from twoends.checkpoint.pack_write import write_pack


@pytest.mark.parametrize("family", ["k3", "kimi_linear"])
@pytest.mark.parametrize("block_bytes", [SMALL_BLOCKS, 1_400_000])
@pytest.mark.parametrize("code", ["fixed", "entropy"])
@pytest.mark.parametrize("experts", [False, True], ids=["trunk", "experts"])
def test_a_pack_says_what_its_source_says(request, tmp_path, family, block_bytes, code, experts):
    index = open_index(request.getfixturevalue(f"nano_{family}"))
    done = write_pack(index, tmp_path / "pack", block_bytes=block_bytes, code=code, experts=experts)
    assert verify(tmp_path / "pack") == done.num_blocks
    assert 0 < done.raw_blocks < done.num_blocks
    assert done.experts_bytes == (index.experts_bytes if experts else 0)


def test_the_entropy_code_takes_fewer_bytes_than_the_fixed_one(nano_k3, tmp_path):
    found = {
        code: write_pack(open_index(nano_k3), tmp_path / code, code=code) for code in ("fixed", "entropy")
    }
    assert found["entropy"].packed_bytes < found["fixed"].packed_bytes < found["fixed"].trunk_bytes


def test_the_bytes_of_all_expert_blocks_are_the_experts_once(nano_k3, with_experts):
    index = reopen(with_experts)
    layers = index.config.moe_layers
    runs = [index.pack.layer(index, layer)[-1] for layer in layers]
    sources = [run.block(k).plan.source for run in runs for k in range(len(run.table))]
    assert sources == [index.expert(layer, k) for layer in layers for k in range(index.config.num_experts)]


def test_the_bytes_of_all_blocks_are_the_trunk_once(nano_k3, whole):
    index = reopen(whole)
    runs = [run for layer in layers_of(index.config) for run in index.pack.layer(index, layer)]
    plans = [run.plan.block(k) for run in runs for k in range(len(run.table))]
    assert sum(segment.nbytes for plan in plans for segment in plan.source) == index.trunk_bytes


def test_blocks_begin_on_borders_and_hold_whole_heads(whole):
    index = reopen(whole)
    assert (index.pack.blocks["offset"] % 4096 == 0).all()
    head = index.config.nope_dim + index.config.value_dim
    for layer in index.config.mla_layers:
        (kv_b,) = [run for run in index.pack.layer(index, layer) if run.plan.name == "kv_b_proj"]
        assert kv_b.plan.rows_per_block % head == 0


def test_f32_and_small_tensors_stay_as_they_are(whole):
    index = reopen(whole)
    for layer in layers_of(index.config):
        for run in index.pack.layer(index, layer):
            if not run.plan.rows_per_block or run.plan.refs[0].dtype == "F32":
                assert not run.table["packed"].any()


def test_a_pack_has_the_fingerprint_of_its_source(nano_k3, whole):
    assert reopen(whole).fingerprint == open_index(nano_k3).fingerprint
