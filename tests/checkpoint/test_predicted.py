"""twoends/checkpoint/predicted.py: the index of a checkpoint that is not here."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from twoends.checkpoint.config import Family, read_config
from twoends.checkpoint.index import CheckpointIndex
from twoends.checkpoint.predicted import predicted_index
from twoends.checkpoint.tiny import write_tiny

SHARED_K3 = Path(__file__).parents[3] / "shared" / "data" / "kimi-k3"


@pytest.mark.parametrize("family", ["kimi-k3", "kimi-linear"])
@pytest.mark.parametrize("num_layers", [5, 12])
def test_the_prediction_is_where_a_written_checkpoint_has_its_tensors(
    tmp_path: Path, family: Family, num_layers: int
) -> None:
    write_tiny(tmp_path, family=family, num_layers=num_layers)
    config = read_config(tmp_path)
    real = CheckpointIndex.open(tmp_path, config)
    guess = predicted_index(tmp_path, config)
    assert guess.paths == real.paths
    assert guess.file_sizes == real.file_sizes
    for layer in (None, *range(num_layers)):
        assert guess.tensors(layer) == real.tensors(layer)
    np.testing.assert_array_equal(guess.tables.expert_offset_LEP, real.tables.expert_offset_LEP)
    np.testing.assert_array_equal(guess.tables.expert_path_LEP, real.tables.expert_path_LEP)
    assert (guess.num_tensors, guess.total_bytes) == (real.num_tensors, real.total_bytes)


@pytest.mark.skipif(not SHARED_K3.is_dir(), reason="the released config is not beside the repository")
def test_the_release_has_its_published_sizes_and_places() -> None:
    index = predicted_index(SHARED_K3, read_config(SHARED_K3))
    assert index.tables.expert_offset_LEP.shape == (92, 896, 6)
    # spec/kimi-k3.md, sections 2 and 9: all but experts, then expert 0 of layer 1 in its shard
    embed_bytes = index.tensor(None, "embed").segment.nbytes
    assert index.trunk_bytes + embed_bytes == 113_509_540_864
    first, *_, last = index.expert(1, 0)
    assert index.paths[first.path_id].name.startswith("model-00002-of-")
    assert (first.offset, last.offset + last.nbytes) == (1_268_562_960, 1_286_110_224)
