"""Tiny checkpoints that many tests share, and an environment of their own for every test."""

from __future__ import annotations

import pytest

from twoends.checkpoint.tiny import write_tiny
from twoends.engine.open import Checkpoint


def pytest_addoption(parser):
    parser.addoption(
        "--matrix",
        choices=("sample", "full"),
        default="sample",
        help="full runs every combination of the bit contract on every instruction set",
    )
    parser.addoption(
        "--big",
        action="store_true",
        help="also runs checkpoints of 1.7 GB and of Kimi K3's true layer sizes under enforced limits",
    )


@pytest.fixture(scope="session")
def nano_dirs(tmp_path_factory):
    """family -> directory of its synthetic nano checkpoint."""
    found = {}
    for family in ("kimi-k3", "kimi-linear"):
        directory = tmp_path_factory.mktemp(family) / "nano"
        write_tiny(directory, preset="nano", family=family, seed=1)
        found[family] = directory
    return found


@pytest.fixture(scope="session")
def nano_checkpoints(nano_dirs):
    """family -> its opened nano checkpoint."""
    return {family: Checkpoint.open(directory) for family, directory in nano_dirs.items()}
