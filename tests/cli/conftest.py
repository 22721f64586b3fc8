"""Every test has a home and a cache of its own, and runs commands in this process."""

from __future__ import annotations

import os
from dataclasses import dataclass

import pytest

from twoends.cli.main import call


@dataclass(frozen=True)
class Result:
    """What one command gave."""

    code: int
    out: str
    err: str


@pytest.fixture(autouse=True)
def own_places(tmp_path, monkeypatch):
    """HOME, caches and the working directory are new; no variable of ours is set."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_COLOR", "1")
    for name in [name for name in os.environ if name.startswith("TWOENDS_")]:
        monkeypatch.delenv(name)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


@pytest.fixture
def twoends(capsys):
    """Runs `twoends WORDS...` and gives code, stdout and stderr."""

    def run(*words: object) -> Result:
        code = call([str(word) for word in words], environment=os.environ)
        captured = capsys.readouterr()
        return Result(code=code, out=captured.out, err=captured.err)

    return run


@pytest.fixture(scope="session")
def nano(nano_dirs):
    """A small Kimi K3 checkpoint."""
    return nano_dirs["kimi-k3"]
