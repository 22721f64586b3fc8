"""Files and readers that the engine's tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.harness import Harness
from twoends.checkpoint.predicted import predicted_index
from twoends.checkpoint.presets import preset_config


@pytest.fixture
def harness(tmp_path):
    """Opens readers over files of known bytes; closes them all at the end."""
    made = Harness(tmp_path)
    yield made
    made.close()


@pytest.fixture(scope="session")
def models(nano_checkpoints):
    """name -> (config, index): nano models, and synthetic shapes of which only the config exists."""
    found = {family: (c.config, c.index) for family, c in nano_checkpoints.items()}
    for preset in ("mini", "layer"):
        config = preset_config(preset)
        found[preset] = (config, predicted_index(Path("nowhere"), config))
    return found
