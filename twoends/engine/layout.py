"""The trunk in the order of use: entries (vectors or one matrix) cut into panels of whole rows."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from twoends.checkpoint.config import ModelConfig
from twoends.checkpoint.index import CheckpointIndex, TensorRef
from twoends.checkpoint.pack_index import BlockRun, PackedBlock, PackedTrunk
from twoends.engine.arena import PAGE
from twoends.engine.reader import Check, aligned_size
from twoends.kernels.ops import F32, Bytes, Format, Matrix
from twoends.kernels.pack_scales import strip_rows
from twoends.model.weights import VECTORS, layer_order, top_order

# Small tensors whose bytes lie closer than this are read as one.
_MERGE_GAP_BYTES = 64 * 1024
# As in native/products.cpp: packed rows that a thread decodes for many inputs.
_UNPACKED_BYTES = 256 * 1024
_LEAST_UNPACKED_ROWS = 4
# As in native/packed_block.h, in units of 64 values and two more: lists of eight rows and an inner one; or
# the two of a strip of scales, and the strip.
_LISTS = 9
_UNIT = 64
_STRIP_LISTS = 3
_FORMATS: dict[str, Format] = {"BF16": "bf16", "F32": "f32"}


@dataclass(frozen=True, slots=True)
class Range:
    """Bytes of one file, where the panel's buffer keeps their aligned superset, and what checks them."""

    path_id: int
    offset: int
    num_bytes: int
    at: int
    check: Check | None = None


@dataclass(frozen=True, slots=True)
class Panel:
    """What is read as one: `room` bytes of buffer, ranges in it, and for a matrix which rows."""

    ranges: tuple[Range, ...]
    room: int
    first_row: int = 0
    rows: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixEntry:
    """One trunk matrix; `rows_per_panel` is a multiple of `row_group` (the rows of one MLA head)."""

    layer: int
    name: str
    ref: TensorRef
    rows_per_panel: int

    @property
    def rows(self) -> int:
        """Rows of the whole matrix."""
        return self.ref.shape[0]

    @property
    def num_panels(self) -> int:
        """Panels that the matrix is cut into."""
        return -(-self.rows // self.rows_per_panel)

    def panel(self, k: int) -> Panel:
        """Panel k."""
        first = k * self.rows_per_panel
        rows = min(self.rows_per_panel, self.rows - first)
        row_bytes = self.ref.segment.nbytes // self.rows
        offset = self.ref.segment.offset + first * row_bytes
        span = Range(self.ref.segment.path_id, offset, rows * row_bytes, 0)
        return Panel((span,), aligned_size(offset, rows * row_bytes), first, rows)

    @property
    def total_room(self) -> int:
        """The sum of `panel(k).room`; a trunk has millions of small panels, so not one by one."""
        row_bytes = self.ref.segment.nbytes // self.rows
        borders = np.append(np.arange(0, self.rows, self.rows_per_panel), self.rows)
        borders = self.ref.segment.offset + borders * row_bytes
        starts = borders[:-1] // PAGE * PAGE
        ends = -(-borders[1:] // PAGE) * PAGE
        return int((ends - starts).sum())

    @property
    def largest_room(self) -> int:
        """The first panel's, near enough: others may begin at another place in a page."""
        return self.panel(0).room

    def matrix(self, k: int, panel: Panel, buffer: Bytes) -> Matrix:
        """Panel k's rows over its bytes."""
        form = _FORMATS[self.ref.dtype]
        return Matrix(format=form, rows=panel.rows, cols=self.ref.shape[1], data=_bytes_of(panel, buffer))


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedEntry:
    """One trunk matrix in a pack: each of its blocks is a panel, packed or as the source has it."""

    layer: int
    name: str
    ref: TensorRef
    run: BlockRun

    @property
    def rows(self) -> int:
        """Rows of the whole matrix."""
        return self.ref.shape[0]

    @property
    def num_panels(self) -> int:
        """Blocks of the matrix."""
        return len(self.run.table)

    @property
    def total_room(self) -> int:
        """The sum of `panel(k).room`."""
        return int(self.run.rooms().sum())

    @property
    def largest_room(self) -> int:
        """The largest `panel(k).room`."""
        return int(self.run.rooms().max())

    def panel(self, k: int) -> Panel:
        """Block k."""
        block = self.run.block(k)
        span = _whole(block)
        return Panel(
            (span,), aligned_size(span.offset, span.num_bytes), block.plan.first_row, block.plan.rows
        )

    def matrix(self, k: int, panel: Panel, buffer: Bytes) -> Matrix:
        """Block k's rows over its bytes."""
        form: Format = "packed" if self.run.is_packed(k) else _FORMATS[self.ref.dtype]
        return Matrix(format=form, rows=panel.rows, cols=self.ref.shape[1], data=_bytes_of(panel, buffer))


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorsEntry:
    """All small tensors of a layer (or of the top), read together as panel 0."""

    layer: int
    refs: tuple[tuple[str, TensorRef], ...]
    name: str = VECTORS
    num_panels: int = 1
    # The one block that holds them all, in a pack; `refs` then point into it.
    block: PackedBlock | None = None

    @property
    def total_room(self) -> int:
        """The room of the one panel."""
        return self.panel(0).room

    @property
    def largest_room(self) -> int:
        """The same."""
        return self.panel(0).room

    @property
    def decoded_bytes(self) -> int:
        """Memory of all its tensors in binary32."""
        return sum(4 * math.prod(ref.shape) for _, ref in self.refs)

    def panel(self, k: int) -> Panel:
        """The one panel, its ranges merged where the file keeps them close."""
        assert k == 0
        if self.block is not None:
            span = _whole(self.block)
            return Panel((span,), aligned_size(span.offset, span.num_bytes))
        ranges: list[Range] = []
        room = 0
        for path_id, begin, end in self._runs():
            ranges.append(Range(path_id, begin, end - begin, room))
            room += aligned_size(begin, end - begin)
        return Panel(tuple(ranges), room)

    def decode(self, panel: Panel, buffer: Bytes) -> dict[str, F32]:
        """Every tensor in binary32; unit axes dropped, convolutions kept [P, width]."""
        return {name: _decode_small(ref, _locate(panel, ref, buffer)) for name, ref in self.refs}

    def _runs(self) -> list[tuple[int, int, int]]:
        runs: list[tuple[int, int, int]] = []
        segments = sorted(
            (ref.segment.path_id, ref.segment.offset, ref.segment.nbytes) for _, ref in self.refs
        )
        for path_id, offset, num_bytes in segments:
            if runs and runs[-1][0] == path_id and offset - runs[-1][2] <= _MERGE_GAP_BYTES:
                runs[-1] = (path_id, runs[-1][1], offset + num_bytes)
            else:
                runs.append((path_id, offset, offset + num_bytes))
        return runs


Entry = MatrixEntry | PackedEntry | VectorsEntry


def trunk_entries(config: ModelConfig, index: CheckpointIndex, *, panel_bytes: int) -> tuple[Entry, ...]:
    """Every trunk entry of a pass in the order of use; the top has layer number `num_layers`.

    In a pack the panels are its blocks, whatever `panel_bytes` says.
    """
    if index.pack is not None:
        return _packed_entries(config, index, index.pack)
    entries: list[Entry] = []
    for layer in range(config.num_layers + 1):
        top = layer == config.num_layers
        refs = index.tensors(None if top else layer)
        order = top_order() if top else layer_order(config, layer)
        small = tuple((name, ref) for name, ref in refs.items() if name not in order and name != "embed")
        entries.append(VectorsEntry(layer=layer, refs=small))
        for name in order[1:]:
            group = _row_group(config, name)
            group_bytes = group * refs[name].segment.nbytes // refs[name].shape[0]
            rows = min(refs[name].shape[0], group * max(1, panel_bytes // group_bytes))
            entries.append(MatrixEntry(layer=layer, name=name, ref=refs[name], rows_per_panel=rows))
    return tuple(entries)


def _packed_entries(config: ModelConfig, index: CheckpointIndex, pack: PackedTrunk) -> tuple[Entry, ...]:
    entries: list[Entry] = []
    for layer in range(config.num_layers + 1):
        top = layer == config.num_layers
        order = top_order() if top else layer_order(config, layer)
        small, *matrices = pack.layer(index, None if top else layer)
        entries.append(VectorsEntry(layer=layer, refs=small.small_refs(), block=small.block(0)))
        runs = {run.plan.name: run for run in matrices}
        for name in order[1:]:
            ref = runs[name].plan.refs[0]
            entries.append(PackedEntry(layer=layer, name=name, ref=ref, run=runs[name]))
    return tuple(entries)


def largest_panel(entries: tuple[Entry, ...]) -> int:
    """Bytes of buffer that the largest panel needs."""
    return max(entry.largest_room for entry in entries)


def pass_bytes(entries: tuple[Entry, ...]) -> int:
    """Bytes asked of the device when every panel is read once."""
    return sum(entry.total_room for entry in entries)


def unpacking_bytes(index: CheckpointIndex, *, threads: int) -> int:
    """What the kernels hold while they multiply packed blocks: a block of kv_b_proj, some rows and the
    exponents that they list per thread."""
    if index.pack is None:
        return 0
    widest = most_kv_b = 0
    for layer in (*range(index.config.num_layers), None):
        for run in index.pack.layer(index, layer):
            if run.plan.rows_per_block:
                widest = max(widest, run.plan.refs[0].shape[1])
            if run.plan.name == "kv_b_proj":
                most_kv_b = max(most_kv_b, run.plan.rows_per_block * run.plan.refs[0].shape[1] * 2)
    strip = 0
    if index.pack.manifest.has_experts and index.expert_format == "mxfp4":
        strip = max(strip_rows(part.shape[1]) * part.shape[1] for part in index.expert_parts[1::2])
    elif index.pack.manifest.has_experts:
        widest = max(widest, *(part.shape[1] for part in index.expert_parts))
    lists = max(_LISTS * _list_bytes(widest), _STRIP_LISTS * _list_bytes(strip))
    return most_kv_b + threads * (max(_UNPACKED_BYTES, _LEAST_UNPACKED_ROWS * widest * 2) + lists)


def _list_bytes(cols: int) -> int:
    return (-(-cols // _UNIT) + 2) * _UNIT


def decoded_vectors(entries: tuple[Entry, ...]) -> list[int]:
    """Per layer, the memory of its small tensors in binary32; they stay decoded where they are pinned."""
    return [entry.decoded_bytes for entry in entries if isinstance(entry, VectorsEntry)]


def _row_group(config: ModelConfig, name: str) -> int:
    # Latent attention needs the key and value rows of a head together.
    return config.nope_dim + config.value_dim if name == "kv_b_proj" else 1


def _whole(block: PackedBlock) -> Range:
    place = block.place
    return Range(place.path_id, place.offset, place.num_bytes, 0, block)


def _bytes_of(panel: Panel, buffer: Bytes) -> Bytes:
    span = panel.ranges[0]
    head = span.offset % PAGE
    return buffer[head : head + span.num_bytes]


def _locate(panel: Panel, ref: TensorRef, buffer: Bytes) -> Bytes:
    segment = ref.segment
    for span in panel.ranges:
        if span.path_id == segment.path_id and span.offset <= segment.offset < span.offset + span.num_bytes:
            start = span.at + span.offset % PAGE + segment.offset - span.offset
            return buffer[start : start + segment.nbytes]
    raise AssertionError(f"{ref.file_name} lies in no range of its panel")


def _decode_small(ref: TensorRef, data: Bytes) -> F32:
    # A copy: the window's bytes are soon overwritten, and their alignment is arbitrary.
    if ref.dtype == "F32":
        values = np.frombuffer(data.tobytes(), np.float32)
    else:
        values = (np.frombuffer(data.tobytes(), np.uint16).astype(np.uint32) << 16).view(np.float32)
    if len(ref.shape) == 3 and ref.shape[1] == 1:
        return values.reshape(ref.shape[0], ref.shape[2])
    return values
