"""Limits that are enforced from outside, and files that leave the page cache."""

from __future__ import annotations

import os
import sys

import pytest

from twoends.bench import limits, page_cache
from twoends.bench.limits import run_capped, try_cap
from twoends.errors import TwoendsError

MEGABYTE = 10**6
needs_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits are set as on Linux")
pytestmark = needs_linux

TAKE = "import mmap\nm = mmap.mmap(-1, {}, mmap.MAP_PRIVATE)\nfor i in range(0, len(m), 4096): m[i] = 1"


def take(num_bytes: int) -> list[str]:
    return [sys.executable, "-I", "-c", TAKE.format(num_bytes)]


def needs(cap: str) -> None:
    reason = try_cap(cap)
    if reason is not None:
        pytest.skip(reason)


@pytest.mark.parametrize("cap", ["cgroup", "rlimit"])
def test_a_program_beyond_its_limit_ends_and_one_within_does_not(cap):
    needs(cap)
    limit = 120 * MEGABYTE
    assert run_capped(take(40 * MEGABYTE), cap=cap, limit_bytes=limit).code == 0
    assert run_capped(take(150 * MEGABYTE), cap=cap, limit_bytes=limit).code != 0


def test_a_cgroup_counts_what_was_taken_and_is_gone_afterwards():
    needs("cgroup")
    ended = run_capped(take(60 * MEGABYTE), cap="cgroup", limit_bytes=200 * MEGABYTE)
    assert ended.peak_bytes is None or 60 * MEGABYTE <= ended.peak_bytes <= 200 * MEGABYTE
    killed = run_capped(take(300 * MEGABYTE), cap="cgroup", limit_bytes=100 * MEGABYTE)
    assert killed.was_killed
    assert killed.hits > 0


def test_without_a_limit_the_trial_says_that_nothing_holds():
    assert try_cap("none") == "a program took 200.0 MB under a limit of 100.0 MB"


def test_a_limit_that_can_not_be_set_is_a_reason_not_a_result(monkeypatch):
    def refuse(limit_bytes):
        raise TwoendsError("no memory cgroup can be made here (this system has none).")

    monkeypatch.setattr(limits, "_make_group", refuse)
    assert try_cap("cgroup") == "no memory cgroup can be made here (this system has none)."


def test_evicted_files_are_out_of_memory_and_read_ones_are_in(tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(os.urandom(64 * 4096))
    if page_cache.evict([path]):
        pytest.skip("this file system keeps its page cache")
    path.read_bytes()
    with path.open("rb") as file:
        assert page_cache._cached_bytes(file.fileno(), 64 * 4096) == 64 * 4096
    assert page_cache.evict([path]) == 0


def test_an_empty_file_has_nothing_to_evict(tmp_path):
    (tmp_path / "empty").touch()
    assert page_cache.evict([tmp_path / "empty"]) == 0
