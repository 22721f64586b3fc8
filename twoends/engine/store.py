"""WeightStore: brings weights where the mathematics asks for them. Implements model/weights.py on disk."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from twoends.checkpoint.config import ModelConfig
from twoends.checkpoint.index import CheckpointIndex
from twoends.engine.arena import PAGE, Arena
from twoends.engine.experts import ExpertSlots, LayerExperts
from twoends.engine.layout import Entry, VectorsEntry
from twoends.engine.reader import Read, Reader, aligned_size
from twoends.engine.resident import ResidentMatrix, head_entry
from twoends.engine.window import Window
from twoends.kernels.ops import F32, I32, Matrix
from twoends.model.weights import VECTORS, Panel

# Embedding rows that are read side by side.
_EMBED_ROWS_AT_ONCE = 16


class WeightStore:
    """Trunk through the window, experts through the slots, embedding rows one by one."""

    def __init__(
        self,
        config: ModelConfig,
        index: CheckpointIndex,
        *,
        entries: tuple[Entry, ...],
        window: Window,
        slots: ExpertSlots,
        reader: Reader,
    ) -> None:
        self._config, self._index = config, index
        self._reader, self._window, self._slots = reader, window, slots
        self._embed = index.tensor(None, "embed")
        self._row_room = embedding_room(index)
        self._rows = Arena(self._row_room * _EMBED_ROWS_AT_ONCE)
        self._layers = [
            LayerWeights(window, {e.name: (i, e) for i, e in enumerate(entries) if e.layer == layer})
            for layer in range(config.num_layers + 1)
        ]

    def layer(self, layer: int) -> LayerWeights:
        """Trunk weights of one layer."""
        return self._layers[layer]

    def top(self) -> LayerWeights:
        """Final norm, output mix and head."""
        return self._layers[-1]

    def experts(self, layer: int) -> LayerExperts:
        """Routed experts of one layer, for one pass."""
        return self._slots.layer(layer)

    def router(self, layer: int) -> list[tuple[int, Matrix]] | None:
        """A layer's router, where it is pinned and has been read."""
        return self._layers[layer].kept("router")

    def expect_passes(self, count: int) -> None:
        """Allows read-ahead for `count` more passes."""
        self._window.allow_passes(count)

    def embedding_rows(self, ids_T: I32) -> F32:
        """h_TD of the tokens; a row is a few kilobytes, so the table is never in memory."""
        distinct = list(dict.fromkeys(ids_T.tolist()))
        rows: dict[int, F32] = {}
        for begin in range(0, len(distinct), _EMBED_ROWS_AT_ONCE):
            rows.update(self._read_rows(distinct[begin : begin + _EMBED_ROWS_AT_ONCE]))
        return np.stack([rows[i] for i in ids_T.tolist()])

    def resident_head(self) -> ResidentMatrix:
        """A head in memory of its own, for who needs it between passes; its bytes are read now."""
        return ResidentMatrix(head_entry(self._config, self._index), self._reader)

    def close(self) -> None:
        """Ends the reads and closes the files."""
        self._reader.close()

    def _read_rows(self, ids: list[int]) -> dict[int, F32]:
        width = self._embed.segment.nbytes // self._embed.shape[0]
        reads: list[tuple[int, Read]] = []
        for i, token in enumerate(ids):
            read = Read(
                path_id=self._embed.segment.path_id,
                offset=self._embed.segment.offset + token * width,
                num_bytes=width,
                buffer=self._rows.view(i * self._row_room, self._row_room),
                kind="embedding",
            )
            self._reader.submit(read, demand=True)
            reads.append((token, read))
        found: dict[int, F32] = {}
        for token, read in reads:
            self._reader.wait(read)
            found[token] = self._decode_row(bytes(read.buffer[read.head : read.head + width]))
        return found

    def _decode_row(self, data: bytes) -> F32:
        if self._embed.dtype == "F32":
            return np.frombuffer(data, np.float32)
        return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)


class LayerWeights:
    """Trunk weights of one layer (or of the top) through the window."""

    def __init__(self, window: Window, entries: dict[str, tuple[int, Entry]]) -> None:
        self._window, self._entries = window, entries
        self._vectors: dict[str, F32] = {}
        # Panels that stay, as they are handed out; by matrix, and whole groups where nothing else is missing.
        self._kept: dict[str, dict[int, tuple[int, Matrix]]] = {}
        self._whole: dict[tuple[str, ...], list[Panel]] = {}

    def __enter__(self) -> LayerWeights:
        """Takes the small tensors, which are the first entry of the layer."""
        if not self._vectors:
            entry_id, entry = self._entries[VECTORS]
            assert isinstance(entry, VectorsEntry)
            self._vectors = entry.decode(*self._window.take(entry_id, 0))
            self._window.release()
        return self

    def __exit__(self, *exc: object) -> None:
        """Drops the small tensors unless the layer's are pinned."""
        entry_id, _ = self._entries[VECTORS]
        if not self._window.is_pinned(entry_id, 0):
            self._vectors = {}

    def vector(self, name: str) -> F32:
        """A small tensor in binary32."""
        return self._vectors[name]

    def kept(self, name: str) -> list[tuple[int, Matrix]] | None:
        """All panels of a matrix with their first rows, if they stay and have been used once."""
        panels = self._kept.get(name, {})
        return list(panels.values()) if len(panels) == self._entries[name][1].num_panels else None

    def rows(self, name: str) -> int:
        """Rows of a whole matrix."""
        entry = self._entries[name][1]
        assert not isinstance(entry, VectorsEntry)
        return entry.rows

    def panels(self, names: tuple[str, ...]) -> Iterator[list[Panel]]:
        """All that has arrived when it is asked for, at least one panel; gone at the next, unless pinned."""
        whole = self._whole.get(names)
        if whole is not None:
            yield whole
            return
        group: list[Panel] = []
        for i, name in enumerate(names):
            entry_id, entry = self._entries[name]
            for k in range(entry.num_panels):
                if group and not self._window.has(entry_id, k):
                    yield group
                    self._window.release()
                    group = []
                group.append((i, *self._panel(name, k)))
        if group:
            yield group
            self._window.release()
        kept = [self.kept(name) for name in names]
        if None not in kept:
            self._whole[names] = [(i, *panel) for i, panels in enumerate(kept) for panel in panels or ()]

    def _panel(self, name: str, k: int) -> tuple[int, Matrix]:
        kept = self._kept.setdefault(name, {})
        if k in kept:
            return kept[k]
        entry_id, entry = self._entries[name]
        assert not isinstance(entry, VectorsEntry)
        panel, buffer = self._window.take(entry_id, k)
        given = (panel.first_row, entry.matrix(k, panel, buffer))
        if self._window.is_pinned(entry_id, k):
            kept[k] = given
        return given


def embedding_room(index: CheckpointIndex) -> int:
    """Bytes of buffer for one embedding row at any offset."""
    embed = index.tensor(None, "embed")
    return aligned_size(PAGE - 1, embed.segment.nbytes // embed.shape[0])


def embedding_bytes(index: CheckpointIndex) -> int:
    """Bytes of buffer that the store holds for embedding rows."""
    return embedding_room(index) * _EMBED_ROWS_AT_ONCE
