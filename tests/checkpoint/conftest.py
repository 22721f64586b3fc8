"""Places and inputs that the checkpoint tests share."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.packs import SMALL_BLOCKS
from tests.support.checkpoints import open_index
from twoends.checkpoint.pack_write import write_pack
from twoends.checkpoint.tiny import write_tiny

SHARED_DATA = Path(__file__).resolve().parents[3] / "shared" / "data"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or leaves an index in the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The directory of released facts beside the repository."""
    if not SHARED_DATA.is_dir():
        pytest.skip(f"the released facts are not at {SHARED_DATA}")
    return SHARED_DATA


@pytest.fixture
def k3_raw(shared_data: Path) -> dict[str, Any]:
    """The released config.json of Kimi K3."""
    return json.loads((shared_data / "kimi-k3" / "config.json").read_text())


@pytest.fixture
def kimi_linear_raw(shared_data: Path) -> dict[str, Any]:
    """The released config.json of Kimi-Linear."""
    return json.loads((shared_data / "kimi-linear" / "config.json").read_text())


@pytest.fixture(scope="session")
def nano_k3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A nano checkpoint in Kimi K3's layout; not to be changed."""
    directory = tmp_path_factory.mktemp("nano-k3")
    write_tiny(directory, preset="nano")
    return directory


@pytest.fixture(scope="session")
def nano_kimi_linear(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A nano checkpoint in Kimi-Linear's layout; not to be changed."""
    directory = tmp_path_factory.mktemp("nano-kimi-linear")
    write_tiny(directory, preset="nano", family="kimi-linear")
    return directory


@pytest.fixture
def k3_copy(nano_k3: Path, tmp_path: Path) -> Path:
    """A nano Kimi K3 checkpoint that a test may damage."""
    return Path(shutil.copytree(nano_k3, tmp_path / "model"))


@pytest.fixture(scope="session")
def whole(nano_k3: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished pack with small blocks; not to be changed."""
    directory = tmp_path_factory.mktemp("whole") / "pack"
    write_pack(open_index(nano_k3), directory, block_bytes=SMALL_BLOCKS)
    return directory


@pytest.fixture(scope="session")
def with_experts(nano_k3: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished pack with experts too; not to be changed."""
    directory = tmp_path_factory.mktemp("whole") / "pack"
    write_pack(open_index(nano_k3), directory, block_bytes=SMALL_BLOCKS, experts=True)
    return directory


@pytest.fixture
def pack(whole: Path, tmp_path: Path) -> Path:
    """A pack that a test may damage."""
    return Path(shutil.copytree(whole, tmp_path / "pack"))
