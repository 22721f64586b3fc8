"""An index without weights: where every tensor would lie if the release of this config were here.

`twoends plan` answers from config.json alone with it. Layers of one kind whose numbers have equally
many digits have equal headers, so each such layout is computed once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from twoends.checkpoint import names
from twoends.checkpoint.config import ModelConfig
from twoends.checkpoint.index import CheckpointIndex
from twoends.checkpoint.index_tables import ROW_DTYPES, Tables, row_starts
from twoends.checkpoint.layout import ShardPlan, TensorPlan, checkpoint_plans, layer_tensors, plan_shard
from twoends.checkpoint.names import ExpertFormat, TensorSpec

I64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Places:
    """Files and offsets of one layer's (or the top's) rows, and of its experts [E, P]."""

    row_path: I64
    row_offset: I64
    expert_path_EP: I64
    expert_offset_EP: I64


def predicted_index(directory: Path, config: ModelConfig) -> CheckpointIndex:
    """The index that the released layout of `config` would give; no file but the config need be there.

    Experts are MXFP4 for Kimi K3 and BF16 for Kimi-Linear, as released. Text tensors only.
    """
    expert_format: ExpertFormat = "mxfp4" if config.family == "kimi-k3" else "bf16"
    if config.family == "kimi-k3":
        file_names, sizes, places = _one_file_per_layer(config, expert_format)
    else:
        file_names, sizes, places = _shared_files(config, expert_format)
    return CheckpointIndex(
        directory=directory,
        config=config,
        paths=tuple(directory / name for name in file_names),
        file_sizes=tuple(sizes),
        fingerprint=hashlib.blake2b(f"predicted\n{config.digest}".encode(), digest_size=16).hexdigest(),
        tables=_tables(config, expert_format, places),
        starts=tuple(row_starts(config)),
    )


def _one_file_per_layer(
    config: ModelConfig, expert_format: ExpertFormat
) -> tuple[list[str], list[int], list[_Places]]:
    known: dict[tuple[tuple[bool, bool], int], tuple[int, _Places]] = {}
    sizes: list[int] = []
    layers: list[_Places] = []
    for layer in range(config.num_layers):
        key = names.layer_kind(config, layer), len(str(layer))
        if key not in known:
            shard = plan_shard("", layer_tensors(config, layer, expert_format))
            found = {name: (0, offset) for name, offset in _offsets(shard)}
            known[key] = shard.file_bytes, _layer_places(config, layer, expert_format, found)
        size, places = known[key]
        sizes.append(size)
        layers.append(_in_file(places, layer))
    top_shard = _top_shard(config)
    sizes.append(top_shard.file_bytes)
    found = {name: (config.num_layers, offset) for name, offset in _offsets(top_shard)}
    count = len(sizes)
    file_names = [f"model-{i:05d}-of-{count:06d}.safetensors" for i in range(1, count + 1)]
    return file_names, sizes, [_places(names.top_specs(config), found), *layers]


def _shared_files(
    config: ModelConfig, expert_format: ExpertFormat
) -> tuple[list[str], list[int], list[_Places]]:
    shards = list(checkpoint_plans(config, expert_format))
    found = {name: (i, offset) for i, shard in enumerate(shards) for name, offset in _offsets(shard)}
    layers = [_layer_places(config, layer, expert_format, found) for layer in range(config.num_layers)]
    return (
        [shard.file_name for shard in shards],
        [shard.file_bytes for shard in shards],
        [_places(names.top_specs(config), found), *layers],
    )


def _top_shard(config: ModelConfig) -> ShardPlan:
    specs = names.top_specs(config)
    return plan_shard("", [TensorPlan(name=s.file_name, dtype=s.released, shape=s.shape) for s in specs])


def _offsets(shard: ShardPlan) -> Iterator[tuple[str, int]]:
    at = len(shard.header)
    for tensor in shard.tensors:
        yield tensor.name, at
        at += tensor.nbytes


def _layer_places(
    config: ModelConfig, layer: int, expert_format: ExpertFormat, found: dict[str, tuple[int, int]]
) -> _Places:
    specs = names.layer_specs(config, layer)
    if not config.is_moe(layer):
        return _places(specs, found)
    parts = names.expert_parts(config, expert_format)
    cells = [
        [found[names.expert_prefix(config, layer, expert) + part.file_name] for part in parts]
        for expert in range(config.num_experts)
    ]
    return _places(specs, found, np.array(cells, np.int64))


def _places(
    specs: tuple[TensorSpec, ...], found: dict[str, tuple[int, int]], cells_EP2: I64 | None = None
) -> _Places:
    rows = np.array([found[spec.file_name] for spec in specs], np.int64)
    if cells_EP2 is None:
        cells_EP2 = np.zeros((0, 0, 2), np.int64)
    return _Places(
        row_path=rows[:, 0],
        row_offset=rows[:, 1],
        expert_path_EP=cells_EP2[..., 0],
        expert_offset_EP=cells_EP2[..., 1],
    )


def _in_file(places: _Places, path_id: int) -> _Places:
    return _Places(
        row_path=np.full_like(places.row_path, path_id),
        row_offset=places.row_offset,
        expert_path_EP=np.full_like(places.expert_path_EP, path_id),
        expert_offset_EP=places.expert_offset_EP,
    )


def _tables(config: ModelConfig, expert_format: ExpertFormat, places: list[_Places]) -> Tables:
    """`places` of the top, then of every layer."""
    specs = [*names.top_specs(config)]
    for layer in range(config.num_layers):
        specs += names.layer_specs(config, layer)
    shapes: dict[tuple[int, ...], int] = {}
    moe = [places[layer + 1] for layer in config.moe_layers]
    experts = len(moe) * config.num_experts
    parts = names.expert_parts(config, expert_format)
    return Tables(
        expert_format=expert_format,
        row_path=np.concatenate([p.row_path for p in places]).astype(np.uint16),
        row_offset=np.concatenate([p.row_offset for p in places]),
        row_dtype=np.array([ROW_DTYPES.index(spec.released) for spec in specs], np.uint8),
        row_shape=np.array([shapes.setdefault(spec.shape, len(shapes)) for spec in specs], np.uint16),
        shapes=tuple(shapes),
        expert_path_LEP=np.stack([p.expert_path_EP for p in moe]).astype(np.uint16),
        expert_offset_LEP=np.stack([p.expert_offset_EP for p in moe]),
        num_tensors=len(specs) + experts * len(parts),
        payload_bytes=sum(spec.nbytes for spec in specs) + experts * sum(part.nbytes for part in parts),
        vision_tensors=0,
        vision_bytes=0,
    )
