"""Tiny checkpoints that many tests share, and an environment of their own for every test."""

from __future__ import annotations

import itertools

import pytest

from twoends.checkpoint.tiny import write_tiny
from twoends.engine.open import Checkpoint


def pytest_addoption(parser):
    parser.addoption(
        "--matrix",
        choices=("sample", "full"),
        default="sample",
        help="full runs every combination of what tests marked `matrix` sample",
    )
    parser.addoption(
        "--big",
        action="store_true",
        help="also runs checkpoints of 1.7 GB and of Kimi K3's true layer sizes under enforced limits",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """`full(reason)`: skipped without --matrix=full, before any fixture is made."""
    mark = item.get_closest_marker("full")
    if mark is not None and item.config.getoption("--matrix") != "full":
        pytest.skip(f"only with --matrix=full: {mark.args[0]}")


def pytest_generate_tests(metafunc):
    """`matrix(names, axes, sample=...)`: the whole product with --matrix=full, elsewhere a sample of it."""
    for mark in metafunc.definition.iter_markers("matrix"):
        names, axes = mark.args
        full = metafunc.config.getoption("--matrix") == "full"
        cases = list(itertools.product(*axes)) if full else mark.kwargs["sample"](axes)
        metafunc.parametrize(names, cases, ids=["-".join(map(_id, case)) for case in cases])


def _id(value):
    return "/".join(map(str, value)) if isinstance(value, tuple) else str(value)


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
