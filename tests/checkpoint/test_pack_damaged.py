"""A pack that is damaged, or whose source is not where or what it was, is refused by name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.checkpoint.packs import SMALL_BLOCKS, contents, reopen, verify
from tests.support.checkpoints import open_index
from twoends.checkpoint.index import CheckpointIndex
from twoends.checkpoint.pack_file import MANIFEST, TABLE, trunk_name
from twoends.checkpoint.pack_index import layers_of
from twoends.checkpoint.pack_write import write_pack
from twoends.checkpoint.tiny import write_tiny
from twoends.errors import CheckpointError


def flip(path: Path, at: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x10]))


def packed_block(index: CheckpointIndex):
    """A packed block somewhere in the middle."""
    runs = [run for layer in layers_of(index.config) for run in index.pack.layer(index, layer)]
    blocks = [run.block(k) for run in runs for k in range(len(run.table)) if run.is_packed(k)]
    return blocks[len(blocks) // 2]


@pytest.mark.parametrize("family", ["k3", "kimi_linear"])
@pytest.mark.parametrize("expert", [0, 7])
def test_a_damaged_expert_is_named(request, tmp_path, family, expert):
    index = open_index(request.getfixturevalue(f"nano_{family}"))
    write_pack(index, tmp_path / "pack", experts=True)
    layer = index.config.moe_layers[2]
    packed = reopen(tmp_path / "pack")
    block = packed.pack.layer(packed, layer)[-1].block(expert)
    flip(block.path, block.place.offset + block.place.num_bytes - 70)
    with pytest.raises(CheckpointError, match=f"is damaged: layer {layer}, expert {expert}"):
        verify(tmp_path / "pack")


@pytest.mark.parametrize("share", [0.0, 0.3, 0.999])
def test_a_flipped_bit_is_found_with_the_name_of_its_block_and_can_be_repaired(nano_k3, whole, pack, share):
    block = packed_block(reopen(pack))
    flip(block.path, block.place.offset + int(share * block.place.num_bytes))
    with pytest.raises(CheckpointError) as caught:
        verify(pack)
    assert f"{block.path.name} is damaged: {block.plan.what}." in str(caught.value)
    done = write_pack(open_index(nano_k3), pack, block_bytes=SMALL_BLOCKS)
    assert done.kept_layers == done.num_layers - 1
    assert contents(pack) == contents(whole)


def test_a_source_that_was_changed_since_is_found_by_verifying(k3_copy, tmp_path):
    write_pack(open_index(k3_copy), tmp_path / "pack")
    block = packed_block(reopen(tmp_path / "pack"))
    segment = block.plan.source[0]
    flip(open_index(k3_copy).paths[segment.path_id], segment.offset + 11)
    with pytest.raises(CheckpointError, match="does not say what its source says: layer"):
        verify(tmp_path / "pack")


def test_a_source_that_moved_is_asked_for(k3_copy, tmp_path):
    write_pack(open_index(k3_copy), tmp_path / "deep" / "pack")
    moved = k3_copy.rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="is not where it was") as caught:
        reopen(tmp_path / "deep" / "pack")
    assert "--source DIR" in str(caught.value)
    assert reopen(tmp_path / "deep" / "pack", source=moved).fingerprint == open_index(moved).fingerprint


def test_a_pack_and_its_source_may_move_together(k3_copy, tmp_path):
    (tmp_path / "old").mkdir()
    source = k3_copy.rename(tmp_path / "old" / "model")
    write_pack(
        open_index(source),
        tmp_path / "old" / "pack",
        stripes=(tmp_path / "old" / "a", tmp_path / "old" / "b"),
    )
    (tmp_path / "old").rename(tmp_path / "new")
    assert verify(tmp_path / "new" / "pack") > 0


def test_a_source_of_another_model_is_refused(pack, tmp_path):
    write_tiny(tmp_path / "other", preset="nano", seed=3, num_layers=5)
    with pytest.raises(
        CheckpointError, match=r"is not the checkpoint that this pack was made from|not whole|does not have"
    ):
        reopen(pack, source=tmp_path / "other")


def test_a_missing_file_of_a_pack_is_named(pack):
    (pack / trunk_name(2)).unlink()
    with pytest.raises(CheckpointError, match=r"trunk-00003.pack of the pack is missing"):
        reopen(pack)


def test_a_short_file_of_a_pack_is_named_with_both_sizes(pack):
    os.truncate(pack / trunk_name(1), 4096)
    with pytest.raises(CheckpointError, match=r"trunk-00002.pack of the pack is short") as caught:
        reopen(pack)
    assert "4,096 bytes" in str(caught.value)


def test_a_damaged_table_is_refused(pack):
    flip(pack / TABLE, 100)
    with pytest.raises(CheckpointError, match="is not the table of this pack's blocks"):
        reopen(pack)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('"format": 2', '"format": 1', "format 1"),
        ('"entropy"', '"huffman"', "code 'huffman'"),
        ('"num_blocks"', '"num_block"', "num_blocks is missing"),
        ('"format"', '"more": 1, "format"', "unknown field, more"),
        ("{", "", "can't be used"),
    ],
)
def test_a_manifest_of_another_form_is_refused(pack, old, new, says):
    text = (pack / MANIFEST).read_text()
    (pack / MANIFEST).write_text(text.replace(old, new, 1))
    with pytest.raises(CheckpointError, match=says):
        reopen(pack)
