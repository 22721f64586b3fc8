"""Packs: every block stands for its source's bytes, and no kill, full disk or damage goes unnoticed."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest

from twoends.checkpoint.config import read_config
from twoends.checkpoint.index import CheckpointIndex
from twoends.checkpoint.pack_file import MANIFEST, TABLE, trunk_name
from twoends.checkpoint.pack_index import layers_of, open_pack
from twoends.checkpoint.pack_source import verify_pack
from twoends.checkpoint.pack_write import write_pack
from twoends.checkpoint.tiny import write_tiny
from twoends.errors import CheckpointError, DoesNotFit, OptionError

ROOT = Path(__file__).parents[2]
# So small that matrices of a nano model have several blocks.
SMALL_BLOCKS = 20_000


def open_index(directory: Path) -> CheckpointIndex:
    return CheckpointIndex.open(directory, read_config(directory))


def reopen(directory: Path, **options) -> CheckpointIndex:
    return open_pack(directory, read_config(directory), **options)


def verify(directory: Path) -> int:
    return verify_pack(reopen(directory), progress=lambda done, total: None)


def contents(directory: Path) -> dict[str, bytes]:
    """Every file of a pack but the manifest, which says where the source is."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name != MANIFEST
    }


@pytest.fixture(scope="module")
def whole(nano_k3, tmp_path_factory):
    """A finished pack with small blocks; not to be changed."""
    directory = tmp_path_factory.mktemp("whole") / "pack"
    write_pack(open_index(nano_k3), directory, block_bytes=SMALL_BLOCKS)
    return directory


@pytest.fixture(scope="module")
def with_experts(nano_k3, tmp_path_factory):
    """A finished pack with experts too; not to be changed."""
    directory = tmp_path_factory.mktemp("whole") / "pack"
    write_pack(open_index(nano_k3), directory, block_bytes=SMALL_BLOCKS, experts=True)
    return directory


@pytest.fixture
def pack(whole, tmp_path):
    """A pack that a test may damage."""
    return Path(shutil.copytree(whole, tmp_path / "pack"))


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


def test_a_pack_without_experts_is_not_taken_for_one_with_them(nano_k3, pack):
    with pytest.raises(OptionError, match="has a pack of another form"):
        write_pack(open_index(nano_k3), pack, block_bytes=SMALL_BLOCKS, experts=True)


def test_a_pack_of_another_code_is_not_gone_on_with(nano_k3, pack):
    with pytest.raises(OptionError, match="has a pack of another form"):
        write_pack(open_index(nano_k3), pack, block_bytes=SMALL_BLOCKS, code="fixed")


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


class Killed(BaseException):
    """Stands for a kill at one point."""


@pytest.mark.parametrize("calls", [1, 7, 40, 99])
def test_a_stopped_pack_goes_on_and_ends_with_the_same_bytes(nano_k3, whole, tmp_path, calls):
    left = [calls]

    def stop(done, total):
        left[0] -= 1
        if not left[0]:
            raise Killed

    index = open_index(nano_k3)
    with pytest.raises(Killed):
        write_pack(index, tmp_path / "pack", block_bytes=SMALL_BLOCKS, progress=stop)
    assert not (tmp_path / "pack" / MANIFEST).exists()
    assert not list((tmp_path / "pack").glob(".trunk*"))
    done = write_pack(index, tmp_path / "pack", block_bytes=SMALL_BLOCKS)
    assert contents(tmp_path / "pack") == contents(whole)
    assert done.kept_layers > 0 or calls < 40


def test_a_killed_process_leaves_nothing_that_counts_and_is_resumed(nano_k3, whole, tmp_path):
    code = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from twoends.checkpoint.config import read_config\n"
        "from twoends.checkpoint.index import CheckpointIndex\n"
        "from twoends.checkpoint.pack_write import write_pack\n"
        "source, out = map(Path, sys.argv[1:])\n"
        "calls = []\n"
        "def kill(done, total):\n"
        "    calls.append(done)\n"
        "    if len(calls) == 60: os.kill(os.getpid(), signal.SIGKILL)\n"
        "index = CheckpointIndex.open(source, read_config(source))\n"
        f"write_pack(index, out, block_bytes={SMALL_BLOCKS}, progress=kill)\n"
    )
    out = tmp_path / "pack"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    killed = subprocess.run(
        [sys.executable, "-c", code, str(nano_k3), str(out)], env=environment, check=False
    )
    assert killed.returncode == -signal.SIGKILL
    assert list(out.glob(".trunk*.part"))
    assert not (out / MANIFEST).exists()
    done = write_pack(open_index(nano_k3), out, block_bytes=SMALL_BLOCKS)
    assert done.kept_layers > 0
    assert contents(out) == contents(whole)


# The calls by which a pack reaches the disk.
STEPS = ("pwrite", "fsync", "replace")


class Stop:
    """Makes the n-th of all STEPS fail with `error`; counts them."""

    def __init__(self, monkeypatch, error=None, at=-1):
        self.calls = 0
        self._monkeypatch = monkeypatch
        for name in STEPS:
            real = getattr(os, name)

            def step(*args, _real=real):
                self.calls += 1
                if self.calls == at:
                    raise error
                return _real(*args)

            monkeypatch.setattr(os, name, step)

    def end(self):
        self._monkeypatch.undo()


@pytest.fixture(scope="module")
def steps_of_a_whole_pack(nano_k3, tmp_path_factory):
    """How many of STEPS it takes."""
    with pytest.MonkeyPatch.context() as patch:
        counted = Stop(patch)
        place = tmp_path_factory.mktemp("counted") / "pack"
        write_pack(open_index(nano_k3), place, block_bytes=SMALL_BLOCKS, experts=True)
    return counted.calls


@pytest.mark.parametrize("error", [Killed(), OSError(errno.ENOSPC, "No space left on device")])
@pytest.mark.parametrize("share", [0.0, 0.001, 0.2, 0.99, "table", "small file", "manifest"])
def test_a_pack_stopped_at_any_write_counts_for_nothing_and_is_resumed(
    nano_k3, with_experts, steps_of_a_whole_pack, tmp_path, monkeypatch, error, share
):
    index = open_index(nano_k3)
    options = {"block_bytes": SMALL_BLOCKS, "experts": True}
    calls = steps_of_a_whole_pack
    # The manifest is synced and renamed last of all, each small file before it, the table before these.
    small = len([path for path in nano_k3.iterdir() if ".safetensors" not in path.name])
    ends = {"manifest": 0, "small file": 3, "table": 2 + 2 * small}
    at = calls - ends[share] if share in ends else 1 + int(share * calls)
    stopped = Stop(monkeypatch, error, at)
    with pytest.raises(Killed if isinstance(error, Killed) else DoesNotFit):
        write_pack(index, tmp_path / "pack", **options)
    stopped.end()
    assert not (tmp_path / "pack" / MANIFEST).exists()
    done = write_pack(index, tmp_path / "pack", **options)
    assert contents(tmp_path / "pack") == contents(with_experts)
    assert done.kept_layers == done.num_layers or share not in ends


@pytest.mark.parametrize("writes", [0, 30, 80])
def test_a_disk_that_fills_publishes_nothing_and_the_rest_is_written_later(
    nano_k3, whole, tmp_path, monkeypatch, writes
):
    left = [writes]
    real = os.pwrite

    def full(fd, data, offset):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data, offset)

    index = open_index(nano_k3)
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(DoesNotFit, match=r"The disk became full while trunk-0000\d.pack was written"):
        write_pack(index, tmp_path / "pack", block_bytes=SMALL_BLOCKS)
    monkeypatch.setattr(os, "pwrite", real)
    assert not (tmp_path / "pack" / MANIFEST).exists()
    assert not list((tmp_path / "pack").glob(".trunk*"))
    write_pack(index, tmp_path / "pack", block_bytes=SMALL_BLOCKS)
    assert contents(tmp_path / "pack") == contents(whole)


def test_too_little_room_is_said_before_anything_is_packed(nano_k3, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage(10**9, 10**9 - 10**6, 10**6))
    with pytest.raises(DoesNotFit, match=r"The pack needs about .* the disk has 1.0 MB free"):
        write_pack(open_index(nano_k3), tmp_path / "pack")
    assert not list((tmp_path / "pack").glob("*trunk*"))


def test_a_place_that_holds_something_else_is_refused(nano_k3, tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(OptionError, match="is not empty"):
        write_pack(open_index(nano_k3), tmp_path)
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["mine.txt"]


def test_a_stripe_that_holds_something_else_is_refused(nano_k3, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "trunk-00001.pack").write_bytes(b"of another pack")
    with pytest.raises(OptionError, match="is not empty"):
        write_pack(open_index(nano_k3), tmp_path / "pack", stripes=(tmp_path / "b", tmp_path / "a"))
    assert (tmp_path / "a" / "trunk-00001.pack").read_bytes() == b"of another pack"


@pytest.mark.parametrize("finished", [True, False])
def test_a_pack_of_another_model_is_not_gone_on_with(pack, nano_k3, tmp_path, finished):
    if not finished:
        shutil.rmtree(pack)
        with pytest.raises(Killed):
            write_pack(open_index(nano_k3), pack, progress=lambda done, total: _kill())
    write_tiny(tmp_path / "other", preset="nano", num_layers=5)
    before = contents(pack)
    with pytest.raises(OptionError, match="has a pack of another model"):
        write_pack(open_index(tmp_path / "other"), pack, block_bytes=SMALL_BLOCKS)
    assert contents(pack) == before


def _kill():
    raise Killed


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
