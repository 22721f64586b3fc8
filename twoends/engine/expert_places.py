"""Where routed experts lie in the files, and the room and the reads that one of them needs."""

from __future__ import annotations

import numpy as np

from twoends.checkpoint.index import CheckpointIndex
from twoends.engine.arena import PAGE, align_up
from twoends.engine.packed_experts import PackedExperts
from twoends.engine.policies import Key


class ExpertPlaces:
    """Where experts lie: as few contiguous runs as their parts make."""

    def __init__(self, index: CheckpointIndex) -> None:
        self._index = index
        self._first_layer = index.config.num_dense_layers
        offsets_LEP, sizes_P, joined_LEP = _parts(index)
        self._sizes = [int(size) for size in sizes_P]
        self._is_one_LE: np.ndarray = np.all(joined_LEP, axis=-1)
        self._offset_LE, self._path_LE = offsets_LEP[..., 0], index.tables.expert_path_LEP[..., 0]

    def runs(self, key: Key) -> list[tuple[int, int, list[int]]]:
        """The parts of an expert as (file, offset, part sizes), joined where they touch."""
        cell = (key[0] - self._first_layer, key[1])
        if self._is_one_LE[cell]:
            return [(int(self._path_LE[cell]), int(self._offset_LE[cell]), self._sizes)]
        runs: list[tuple[int, int, list[int]]] = []
        for segment in self._index.expert(*key):
            if runs and runs[-1][0] == segment.path_id and runs[-1][1] + sum(runs[-1][2]) == segment.offset:
                runs[-1][2].append(segment.nbytes)
            else:
                runs.append((segment.path_id, segment.offset, [segment.nbytes]))
        return runs


def slot_bytes(index: CheckpointIndex) -> int:
    """Room that any expert of this checkpoint needs, alignment included."""
    packed = PackedExperts.of(index)
    if packed is not None:
        return packed.most_bytes
    offsets_LEP, sizes_P, joined_LEP = _parts(index)
    if not joined_LEP.all():
        return sum(align_up(size) + PAGE for size in sizes_P.tolist())
    head = int((offsets_LEP[..., 0] % PAGE).max()) if offsets_LEP.size else 0
    return align_up(int(sizes_P.sum()) + head)


def expert_read_bytes(index: CheckpointIndex) -> float:
    """Mean bytes asked of the device for one expert, alignment included."""
    packed = PackedExperts.of(index)
    if packed is not None:
        return packed.mean_bytes
    offsets_LEP, sizes_P, joined_LEP = _parts(index)
    if not offsets_LEP.size:
        return 0.0
    border_LE1 = np.ones((*offsets_LEP.shape[:2], 1), bool)
    begins = offsets_LEP[np.concatenate([border_LE1, ~joined_LEP], axis=2)]
    ends = (offsets_LEP + sizes_P)[np.concatenate([~joined_LEP, border_LE1], axis=2)]
    read_bytes = int((-(-ends // PAGE) * PAGE).sum()) - int((begins // PAGE * PAGE).sum())
    return read_bytes / offsets_LEP[..., 0].size


def _parts(index: CheckpointIndex) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Offsets and sizes of the parts of all experts, and whether the next part follows at once."""
    sizes_P = np.array([part.nbytes for part in index.expert_parts], np.int64)
    offsets_LEP = index.tables.expert_offset_LEP
    paths_LEP = index.tables.expert_path_LEP
    follows_LEP = offsets_LEP[..., :-1] + sizes_P[:-1] == offsets_LEP[..., 1:]
    return offsets_LEP, sizes_P, follows_LEP & (paths_LEP[..., :-1] == paths_LEP[..., 1:])
