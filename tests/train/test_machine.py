"""What training asks of the process before torch is loaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SETTLED = """
import json, os
from twoends.train.machine import settle_process
settle_process()
print(json.dumps({name: os.environ.get(name) for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}))
"""


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "20000"}),
        ({"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "7"}),
        ({"OMP_WAIT_POLICY": "active"}, {"OMP_WAIT_POLICY": "active", "GOMP_SPINCOUNT": None}),
    ],
)
def test_threads_spin_a_moment_and_sleep_unless_the_user_says_otherwise(
    given: dict[str, str], wanted: dict[str, str | None]
) -> None:
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    done = subprocess.run(
        [sys.executable, "-c", SETTLED],
        env=plain | given | {"PYTHONPATH": str(ROOT)}, cwd=ROOT, timeout=60, check=True, capture_output=True,
    )  # fmt: skip
    assert json.loads(done.stdout) == wanted
