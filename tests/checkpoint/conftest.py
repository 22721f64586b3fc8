"""Places and inputs that the checkpoint tests share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

SHARED_DATA = Path(__file__).resolve().parents[3] / "shared" / "data"


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
