"""An index that is kept must be as good as one that is built, or not be used."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoint.handmade_shards import SHARD_OF_LAYER_5
from tests.support.checkpoints import open_index
from twoends.checkpoint import index_cache
from twoends.errors import CheckpointError


def kept() -> list[Path]:
    return list(index_cache.cache_directory().glob("*"))


def test_a_kept_index_equals_a_built_one(k3_copy: Path) -> None:
    built = open_index(k3_copy, cache_from=0)
    (path,) = kept()
    stamp = path.stat().st_mtime_ns
    again = open_index(k3_copy, cache_from=0)
    assert path.stat().st_mtime_ns == stamp
    assert again.fingerprint == built.fingerprint
    assert again.tensors(5) == built.tensors(5)
    assert again.expert(5, 13) == built.expert(5, 13)
    assert (again.total_bytes, again.trunk_bytes) == (built.total_bytes, built.trunk_bytes)


def test_a_small_index_is_not_kept(k3_copy: Path) -> None:
    open_index(k3_copy)
    assert kept() == []


@pytest.mark.parametrize("damage", ["flip", "cut", "empty"])
def test_a_damaged_kept_index_is_built_again(k3_copy: Path, damage: str) -> None:
    built = open_index(k3_copy, cache_from=0)
    (path,) = kept()
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes({"flip": bytes(data), "cut": bytes(data[:-1]), "empty": b""}[damage])
    again = open_index(k3_copy, cache_from=0)
    assert again.expert(8, 13) == built.expert(8, 13)
    assert open_index(k3_copy, cache_from=0).fingerprint == built.fingerprint


def test_a_changed_shard_is_not_served_from_the_cache(k3_copy: Path) -> None:
    open_index(k3_copy, cache_from=0)
    path = k3_copy / SHARD_OF_LAYER_5
    path.write_bytes(path.read_bytes()[:-64])
    with pytest.raises(CheckpointError, match="ends 64 bytes early"):
        open_index(k3_copy, cache_from=0)


def test_a_shard_replaced_by_one_of_equal_size_is_read_again(k3_copy: Path) -> None:
    open_index(k3_copy, cache_from=0)
    path = k3_copy / SHARD_OF_LAYER_5
    path.write_bytes(path.read_bytes().replace(b"dt_bias", b"dt_bios", 1))
    with pytest.raises(CheckpointError, match="does not hold the tensors"):
        open_index(k3_copy, cache_from=0)


def test_a_cache_that_can_not_be_written_is_not_an_error(
    k3_copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert open_index(k3_copy, cache_from=0).num_tensors == 906
