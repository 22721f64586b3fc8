"""What every oracle runs under."""

from __future__ import annotations

import sys

import pytest


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Torch's threads wait for each other longer than these small products take."""
    torch = sys.modules.get("torch")  # a module that needs torch has imported it by now
    if torch is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
