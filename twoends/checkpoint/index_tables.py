"""Where every tensor lies, as numpy tables: 497,220 tensors of Kimi K3 in about 5 MB.

Tensors that are not routed experts ("resident" here, though most stream) have one row each, the top
ones first, then layer by layer in the order of names.layer_specs. Routed experts have a cell each
in a table [MoE layer, expert, part].
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from twoends.checkpoint import names
from twoends.checkpoint.config import ModelConfig
from twoends.checkpoint.names import ExpertFormat, TensorSpec
from twoends.checkpoint.safetensors import ShardHeader
from twoends.errors import CheckpointError

ROW_DTYPES: tuple[names.DType, ...] = ("BF16", "F32")
_ABSENT = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """Places of all text tensors. Offsets are absolute in their files; paths count the shards."""

    expert_format: ExpertFormat
    row_path: NDArray[np.uint16]
    row_offset: NDArray[np.int64]
    row_dtype: NDArray[np.uint8]
    row_shape: NDArray[np.uint16]
    shapes: tuple[tuple[int, ...], ...]
    expert_path_LEP: NDArray[np.uint16]
    expert_offset_LEP: NDArray[np.int64]
    num_tensors: int
    payload_bytes: int
    vision_tensors: int
    vision_bytes: int

    def row_bytes(self) -> NDArray[np.int64]:
        """Bytes of every resident tensor."""
        values = np.array([names.num_values(shape) for shape in self.shapes], dtype=np.int64)
        sizes = np.array([names.DTYPE_BYTES[dtype] for dtype in ROW_DTYPES], dtype=np.int64)
        return values[self.row_shape] * sizes[self.row_dtype]


def row_starts(config: ModelConfig) -> list[int]:
    """First row of each layer; one more entry for the end."""
    starts = [len(names.top_specs(config))]
    lengths: dict[tuple[bool, bool], int] = {}
    for layer in range(config.num_layers):
        kind = names.layer_kind(config, layer)
        if kind not in lengths:
            lengths[kind] = len(names.layer_specs(config, layer))
        starts.append(starts[-1] + lengths[kind])
    return starts


class TableBuilder:
    """Takes headers shard by shard, each tensor once; refuses what the config doesn't know."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        specs = [*names.top_specs(config)]
        for layer in range(config.num_layers):
            specs += names.layer_specs(config, layer)
        self._rows = {spec.file_name: row for row, spec in enumerate(specs)}
        self._specs = specs
        self._row_path = np.zeros(len(specs), dtype=np.uint16)
        self._row_offset = np.full(len(specs), _ABSENT, dtype=np.int64)
        self._row_dtype = np.zeros(len(specs), dtype=np.uint8)
        self._row_shape = np.zeros(len(specs), dtype=np.uint16)
        self._shapes: dict[tuple[int, ...], int] = {}
        self._pattern = names.expert_pattern(config)
        self._format: ExpertFormat | None = None
        self._format_from = ""
        self._parts: dict[str, tuple[int, str, tuple[int, ...]]] = {}
        self._expert_path = np.zeros((0, 0, 0), dtype=np.uint16)
        self._expert_offset = np.zeros((0, 0, 0), dtype=np.int64)
        self._num_tensors = self._payload = self._vision = self._vision_bytes = 0

    def add(self, header: ShardHeader, *, path_id: int) -> None:
        """All tensors of one shard. Raises CheckpointError."""
        begins = header.begins.tolist()
        for i, name in enumerate(header.names):
            dtype, shape = header.dtypes[i], header.shapes[i]
            row = self._rows.get(name)
            if row is not None:
                self._add_row(header.path, row, dtype, shape)
                self._row_path[row] = path_id
                self._row_offset[row] = begins[i]
                continue
            match = self._pattern.fullmatch(name)
            if match is not None:
                layer, expert, matrix, kind = match.groups()
                cell = (int(layer) - self._config.num_dense_layers, int(expert))
                part = self._part(header.path, name, f"{matrix}.{kind}", dtype, shape)
                self._check_cell(header.path, name, cell, part)
                self._expert_path[cell[0], cell[1], part] = path_id
                self._expert_offset[cell[0], cell[1], part] = begins[i]
            elif name.startswith(names.VISION_PREFIXES):
                self._vision += 1
                self._vision_bytes += int(header.ends[i]) - begins[i]
            else:
                raise self._unknown(header.path, name)
        self._num_tensors += len(header.names)
        self._payload += header.payload_bytes

    def finish(self) -> Tables:
        """The tables, if every tensor of the config is there. Raises CheckpointError."""
        absent = np.flatnonzero(self._row_offset == _ABSENT)
        if absent.size:
            spec = self._specs[absent[0]]
            raise _missing(spec.file_name, f"{spec.released} {list(spec.shape)}", int(absent.size))
        if self._format is None:
            first = names.expert_prefix(self._config, self._config.num_dense_layers, 0)
            raise _missing(f"{first}w1", "an expert matrix", self._config.num_experts)
        cells = np.argwhere(self._expert_offset == _ABSENT)
        if len(cells):
            layer, expert, part = cells[0].tolist()
            spec = names.expert_parts(self._config, self._format)[part]
            prefix = names.expert_prefix(self._config, layer + self._config.num_dense_layers, expert)
            raise _missing(prefix + spec.file_name, f"{spec.released} {list(spec.shape)}", len(cells))
        return Tables(
            expert_format=self._format,
            row_path=self._row_path,
            row_offset=self._row_offset,
            row_dtype=self._row_dtype,
            row_shape=self._row_shape,
            shapes=tuple(self._shapes),
            expert_path_LEP=self._expert_path,
            expert_offset_LEP=self._expert_offset,
            num_tensors=self._num_tensors,
            payload_bytes=self._payload,
            vision_tensors=self._vision,
            vision_bytes=self._vision_bytes,
        )

    def _add_row(self, path: Path, row: int, dtype: str, shape: tuple[int, ...]) -> None:
        spec = self._specs[row]
        if self._row_offset[row] != _ABSENT:
            raise _twice(path, spec.file_name)
        shape_fits = names.accepts_shape(spec, shape, self._config)
        if not shape_fits or not names.accepts_dtype(spec, dtype):
            raise _wrong_form(path, spec, "BF16 or F32", dtype=dtype, shape=shape)
        self._row_dtype[row] = ROW_DTYPES.index(dtype)
        self._row_shape[row] = self._shapes.setdefault(shape, len(self._shapes))

    def _part(self, path: Path, name: str, stored: str, dtype: str, shape: tuple[int, ...]) -> int:
        """Which part of an expert this tensor is, by what follows the expert's prefix."""
        if self._format is None:
            self._choose_format(path, name, stored, dtype)
        if stored not in self._parts:
            raise CheckpointError(
                f"{path.name} mixes packed and plain experts.",
                evidence=[
                    ("file", str(path)),
                    ("expected", f"{self._format} like {self._format_from}"),
                    ("found", name),
                ],
                remedies=["All routed experts must be stored one way: packed MXFP4, or plain matrices."],
            )
        part, wanted_dtype, wanted_shape = self._parts[stored]
        if dtype != wanted_dtype or shape != wanted_shape:
            spec = TensorSpec(short=stored, file_name=name, shape=wanted_shape, released="U8")
            raise _wrong_form(path, spec, wanted_dtype, dtype=dtype, shape=shape)
        return part

    def _choose_format(self, path: Path, name: str, stored: str, dtype: str) -> None:
        config = self._config
        if not stored.endswith(".weight"):
            if config.expert_width % 32 or config.expert_input % 32:
                raise CheckpointError(
                    f"{path.name} has packed experts, but their widths are not multiples of 32.",
                    evidence=[
                        ("tensor", name),
                        ("widths", f"{config.expert_input} in, {config.expert_width} inside"),
                    ],
                )
            self._format = "mxfp4"
        else:
            self._format = "f32" if dtype == "F32" else "bf16"
        self._format_from = name
        parts = names.expert_parts(config, self._format)
        self._parts = {part.file_name: (i, part.released, part.shape) for i, part in enumerate(parts)}
        cells = (len(config.moe_layers), config.num_experts, len(parts))
        self._expert_path = np.zeros(cells, dtype=np.uint16)
        self._expert_offset = np.full(cells, _ABSENT, dtype=np.int64)

    def _check_cell(self, path: Path, name: str, cell: tuple[int, int], part: int) -> None:
        layers, experts, _ = self._expert_offset.shape
        if not (0 <= cell[0] < layers and cell[1] < experts):
            raise self._unknown(path, name)
        if self._expert_offset[cell[0], cell[1], part] != _ABSENT:
            raise _twice(path, name)

    def _unknown(self, path: Path, name: str) -> CheckpointError:
        layer = names.layer_of(name)
        near = difflib.get_close_matches(name, self._rows, n=1, cutoff=0.8)
        rows = [("file", str(path)), ("tensor", name)]
        if layer is not None:
            rows.append(("layer", f"{layer} of 0..{self._config.num_layers - 1}"))
            rows.append(("experts", f"0..{self._config.num_experts - 1} in layers with experts"))
        if near:
            rows.append(("nearest known name", near[0]))
        return CheckpointError(
            f"{path.name} has a tensor that this config does not have: {name}.",
            evidence=rows,
            remedies=[
                "The config and the weights may be of two models; a weight is never left out in silence."
            ],
        )


def _missing(name: str, expected: str, num_missing: int) -> CheckpointError:
    layer = names.layer_of(name)
    rows = [("expected", f"{name}  {expected}"), ("found", "in no shard")]
    if layer is not None:
        rows.insert(0, ("layer", str(layer)))
    if num_missing > 1:
        rows.append(("missing in all", f"{num_missing:,} tensors"))
    where = f"layer {layer} lacks a tensor" if layer is not None else "a tensor is missing"
    return CheckpointError(
        f"The checkpoint is not whole: {where}.",
        evidence=rows,
        remedies=["Fetch the missing shard, then:  twoends inspect MODEL --sizes"],
    )


def _wrong_form(
    path: Path, spec: TensorSpec, wanted_dtype: str, *, dtype: str, shape: tuple[int, ...]
) -> CheckpointError:
    layer = names.layer_of(spec.file_name)
    place = [] if layer is None else [("layer", str(layer))]
    return CheckpointError(
        f"{spec.file_name} does not have the form that the config asks for.",
        evidence=[
            ("file", str(path)),
            *place,
            ("expected", f"{wanted_dtype} {list(spec.shape)}"),
            ("found", f"{dtype} {list(shape)}"),
        ],
        remedies=["The config and the weights may be of two models."],
    )


def _twice(path: Path, name: str) -> CheckpointError:
    return CheckpointError(
        f"{name} is in two shards.",
        evidence=[("second in", str(path))],
        remedies=["Which of them is meant can't be known; remove the shard that doesn't belong."],
    )
