"""A pack that is stopped anywhere, by a kill or a full disk, counts for nothing and is gone on with."""

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

from tests.checkpoint.packs import SMALL_BLOCKS, contents
from tests.support.checkpoints import open_index
from twoends.checkpoint.pack_file import MANIFEST
from twoends.checkpoint.pack_write import write_pack
from twoends.checkpoint.tiny import write_tiny
from twoends.errors import DoesNotFit, OptionError

ROOT = Path(__file__).parents[2]


def test_a_pack_without_experts_is_not_taken_for_one_with_them(nano_k3, pack):
    with pytest.raises(OptionError, match="has a pack of another form"):
        write_pack(open_index(nano_k3), pack, block_bytes=SMALL_BLOCKS, experts=True)


def test_a_pack_of_another_code_is_not_gone_on_with(nano_k3, pack):
    with pytest.raises(OptionError, match="has a pack of another form"):
        write_pack(open_index(nano_k3), pack, block_bytes=SMALL_BLOCKS, code="fixed")


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
