"""A trunk matrix in memory of its own, outside the window: read once, used at any time."""

from __future__ import annotations

from twoends.checkpoint.config import ModelConfig
from twoends.checkpoint.index import CheckpointIndex
from twoends.engine.arena import Arena, align_up
from twoends.engine.layout import Entry, VectorsEntry, trunk_entries
from twoends.engine.reader import Read, Reader
from twoends.model.weights import Panel

_WHOLE_MATRIX_BYTES = 1 << 62


class ResidentMatrix:
    """All panels of one matrix (or blocks, in a pack), read when it is made and checked like any others."""

    def __init__(self, entry: Entry, reader: Reader) -> None:
        """Raises ReadError, or what the check of a block finds."""
        assert not isinstance(entry, VectorsEntry), "a matrix is multiplied, small tensors are not"
        self._arena = Arena(resident_bytes(entry))
        self.panels: list[Panel] = []
        reads: list[Read] = []
        at = 0
        for k in range(entry.num_panels):
            panel = entry.panel(k)
            buffer = self._arena.bytes_[at : at + panel.room]
            at += panel.room
            reads += [
                Read(
                    path_id=span.path_id,
                    offset=span.offset,
                    num_bytes=span.num_bytes,
                    buffer=buffer.data[span.at :],
                    kind="trunk",
                    check=span.check,
                )
                for span in panel.ranges
            ]
            self.panels.append((0, panel.first_row, entry.matrix(k, panel, buffer)))
        reader.submit_all(reads, demand=True)
        for read in reads:
            reader.wait(read)

    @property
    def num_bytes(self) -> int:
        """Memory of all panels."""
        return self._arena.num_bytes


def head_entry(config: ModelConfig, index: CheckpointIndex) -> Entry:
    """lm_head as one panel, or as the blocks of a pack."""
    entries = trunk_entries(config, index, panel_bytes=_WHOLE_MATRIX_BYTES)
    return next(entry for entry in reversed(entries) if entry.name == "lm_head")


def resident_bytes(entry: Entry) -> int:
    """Memory of a matrix that is held so."""
    return align_up(entry.total_room)
