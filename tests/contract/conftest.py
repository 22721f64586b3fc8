"""The reference runs and the packs that the tests of the bit contract share."""

from __future__ import annotations

import pytest

from tests.contract.axes import LONG, PACKS
from tests.support.running import PROMPT, make_ops, run
from twoends.checkpoint.pack_write import write_pack
from twoends.engine.open import Checkpoint


@pytest.fixture(scope="session")
def expected(nano_checkpoints):
    """family -> the reference run of LONG tokens."""
    return {
        family: run(checkpoint, ops=make_ops("plain"), num_new=LONG, chunk=len(PROMPT))
        for family, checkpoint in nano_checkpoints.items()
    }


@pytest.fixture(scope="session")
def trunks(nano_checkpoints, tmp_path_factory):
    """(family, pack) -> the checkpoint as it is, or from one of the PACKS of it."""
    found = {(family, "none"): checkpoint for family, checkpoint in nano_checkpoints.items()}
    for family, checkpoint in nano_checkpoints.items():
        place = tmp_path_factory.mktemp(f"packs-{family}")
        for pack, options in list(PACKS.items())[1:]:
            stripes = tuple(place / f"stripe-{i}" for i in range(options.get("stripes", 0)))
            write_pack(checkpoint.index, place / pack, **(options | {"stripes": stripes}))
            found[family, pack] = Checkpoint.open(place / pack)
    return found
