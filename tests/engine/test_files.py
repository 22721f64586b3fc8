"""Weight files: direct reads where they are right, buffered ones elsewhere, and nothing left behind."""

from __future__ import annotations

import errno
import os
import sys

import pytest

from tests.engine.harness import fetched, make_read, pattern
from twoends.engine.arena import PAGE
from twoends.engine.files import WeightFiles
from twoends.errors import CheckpointError

needs_direct = pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="this system has no O_DIRECT")


@pytest.mark.parametrize("offset", [2**31 - 3, 2**32 + 5, 2**41 + 4095])
def test_offsets_beyond_four_gigabytes_are_right(harness, tmp_path, offset):
    data = pattern(3 * PAGE)
    path = tmp_path / "huge"
    with path.open("wb") as file:
        try:
            file.seek(offset)
            file.write(data)
        except OSError:
            pytest.skip("the file system takes no sparse file of this size")
    assert path.stat().st_blocks * 512 < 2**20
    assert fetched(harness.reader(path), make_read(offset, len(data))) == data


@needs_direct
def test_direct_reads_are_used_where_they_are_right(harness):
    reader = harness.reader(harness.file(pattern(PAGE)))
    if not reader.files.direct:
        pytest.skip(reader.files.reason)
    assert reader.files.reason == "O_DIRECT, verified at open"


@needs_direct
def test_where_direct_reads_are_refused_buffered_reads_take_over_and_say_so(harness, monkeypatch):
    real = os.open

    def refusing(path, flags, *rest, **more):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", refusing)
    data = pattern(2 * PAGE)
    reader = harness.reader(harness.file(data))
    assert not reader.files.direct
    assert "O_DIRECT is not usable here" in reader.files.reason
    assert "Invalid argument" in reader.files.reason
    assert fetched(reader, make_read(5, 5000)) == data[5:5005]


@needs_direct
def test_where_direct_reads_lie_buffered_reads_take_over_and_name_the_file(harness, monkeypatch):
    real = os.preadv

    def lying(fd, buffers, offset, *flags):
        count = real(fd, buffers, offset, *flags)
        buffers[0][17] ^= 1
        return count

    data = pattern(2 * PAGE)
    path = harness.file(data, "liar.safetensors")
    with monkeypatch.context() as patched:
        patched.setattr(os, "preadv", lying)
        reader = harness.reader(path)
    assert not reader.files.direct
    assert "liar.safetensors reads differently with it" in reader.files.reason
    assert fetched(reader, make_read(5, 5000)) == data[5:5005]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="descriptors are counted in /proc")
def test_no_file_stays_open_whichever_way_the_check_goes(tmp_path, monkeypatch):
    paths = [tmp_path / f"s{i}" for i in range(3)]
    for path in paths:
        path.write_bytes(pattern(PAGE))
    before = len(os.listdir("/proc/self/fd"))
    for refuse in (False, True):
        if refuse:
            monkeypatch.setattr(WeightFiles, "_compare", _refuse_the_third())
        WeightFiles(paths).close()
        assert len(os.listdir("/proc/self/fd")) == before


def _refuse_the_third():
    calls = []

    def compare(self, path, direct_fd, buffered_fd):
        calls.append(path)
        if len(calls) == 3:
            raise OSError(errno.EINVAL, "refused")

    return compare


def test_buffered_reads_leave_no_page_cache_behind(harness, monkeypatch):
    if not hasattr(os, "posix_fadvise"):
        pytest.skip("this system has no posix_fadvise")
    advised = []
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, offset, size, advice: advised.append((offset, size)))
    reader = harness.reader(harness.file(pattern(4 * PAGE)), direct=False)
    fetched(reader, make_read(PAGE + 1, PAGE))
    assert advised == [(PAGE, 2 * PAGE)]


def test_a_file_that_is_gone_is_named_at_open(tmp_path):
    with pytest.raises(CheckpointError, match=r"model-1.safetensors can't be opened: No such file"):
        WeightFiles([tmp_path / "model-1.safetensors"])
