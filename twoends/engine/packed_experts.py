"""Routed experts of a pack that has them: a block each, read in one piece, checked, multiplied as it lies."""

from __future__ import annotations

import numpy as np

from twoends.checkpoint.index import CheckpointIndex
from twoends.checkpoint.pack_expert import expert_matrices
from twoends.checkpoint.pack_index import BlockRun, PackedBlock, PackedTrunk
from twoends.kernels.ops import Bytes, ExpertWeights


class PackedExperts:
    """Where the experts' blocks are, and what their bytes mean."""

    def __init__(self, index: CheckpointIndex, pack: PackedTrunk) -> None:
        self._index = index
        self._runs: dict[int, BlockRun] = {
            layer: pack.layer(index, layer)[-1] for layer in index.config.moe_layers
        }
        rooms_LE = np.array([run.rooms() for run in self._runs.values()])
        # Bytes asked of the device for the largest expert, and on average.
        self.most_bytes = int(rooms_LE.max()) if rooms_LE.size else 0
        self.mean_bytes = float(rooms_LE.mean()) if rooms_LE.size else 0.0

    @classmethod
    def of(cls, index: CheckpointIndex) -> PackedExperts | None:
        """Those of an index that was opened from a pack with experts."""
        if index.pack is None or not index.pack.manifest.has_experts:
            return None
        return cls(index, index.pack)

    def block(self, layer: int, expert: int) -> PackedBlock:
        """The block of one expert; called with the bytes that were read, it checks them."""
        return self._runs[layer].block(expert)

    def weights(self, data: Bytes) -> ExpertWeights:
        """The matrices of the expert whose block `data` is. Its checksum has been verified."""
        return expert_matrices(data, self._index.expert_parts, self._index.expert_format)
