"""docs/cli.md is made from the commands' help."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

MAKER = Path(__file__).parents[2] / "docs" / "make_cli.py"


def test_the_page_is_fresh():
    done = subprocess.run(
        [sys.executable, MAKER, "--check"],
        capture_output=True,
        text=True,
        check=False,
        cwd=MAKER.parents[1],
        env={"PYTHONPATH": str(MAKER.parents[1])},
    )
    assert (done.returncode, done.stderr) == (0, "")
