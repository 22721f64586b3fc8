"""Files and readers that the engine's tests share."""

from __future__ import annotations

import pytest

from tests.engine.harness import Harness


@pytest.fixture
def harness(tmp_path):
    """Opens readers over files of known bytes; closes them all at the end."""
    made = Harness(tmp_path)
    yield made
    made.close()
