"""Every example runs as a user would run it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
SHIPPED = ROOT / "twoends" / "assets" / "nano" / "config.json"

pytestmark = pytest.mark.skipif(not SHIPPED.exists(), reason="the checkpoint that ships is not here")


def run_example(path):
    return subprocess.run([sys.executable, str(path)], check=False, capture_output=True, text=True, cwd=ROOT)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_an_example_runs_and_prints(path):
    done = run_example(path)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) > 5


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_an_example_fits_a_page(path):
    assert len(path.read_text().splitlines()) <= 40


def test_every_budget_prints_the_same_digest():
    lines = run_example(ROOT / "examples" / "02_same_answer_any_budget.py").stdout.splitlines()
    assert len(lines) == 3
    assert len({line.split("logits")[1] for line in lines}) == 1
    reads = [float(line.split("read")[1].split("MB")[0]) for line in lines]
    assert reads[2] > reads[0]
