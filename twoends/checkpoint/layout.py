"""Which tensor goes into which shard, and at which byte: the layout of the releases, without data.

In a file: 8 bytes of length, a compact JSON header padded with spaces to a multiple of 8, tensors
by width of their dtype (widest first), then by full name in byte order. Across files: Kimi K3 has
one file per layer and one for the top; Kimi-Linear fills files in module order up to 5 GB.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from twoends.checkpoint import names
from twoends.checkpoint.config import ModelConfig
from twoends.checkpoint.names import DTYPE_BYTES, DType, ExpertFormat, TensorSpec

KIMI_LINEAR_SHARD_BYTES = 5 * 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlan:
    """One tensor to be written."""

    name: str
    dtype: DType
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return names.num_values(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPlan:
    """One file to be written: its header's bytes (length included) and its tensors in file order."""

    file_name: str
    header: bytes
    tensors: tuple[TensorPlan, ...]

    @property
    def payload_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def file_bytes(self) -> int:
        return len(self.header) + self.payload_bytes


def plan_shard(
    file_name: str, tensors: Iterable[TensorPlan], *, metadata: dict[str, str] | None = None
) -> ShardPlan:
    """The plan of one file in the released order."""
    ordered = sorted(tensors, key=lambda t: (-DTYPE_BYTES[t.dtype], t.name.encode("utf-8")))
    entries: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    begin = 0
    for tensor in ordered:
        end = begin + tensor.nbytes
        if tensor.name in entries:
            raise ValueError(f"{tensor.name} is planned twice in {file_name}")
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-len(text) % 8)
    return ShardPlan(
        file_name=file_name, header=len(text).to_bytes(8, "little") + text, tensors=tuple(ordered)
    )


def checkpoint_plans(config: ModelConfig, expert_format: ExpertFormat) -> Iterator[ShardPlan]:
    """Every shard of a text-only checkpoint as its family's release lays it out, one at a time."""
    if config.family == "kimi-k3":
        yield from _one_file_per_layer(config, expert_format)
    else:
        yield from _files_in_module_order(config, expert_format)


def layer_tensors(config: ModelConfig, layer: int, expert_format: ExpertFormat) -> list[TensorPlan]:
    """All tensors of one layer at their released dtypes, routed experts included."""
    planned = [_plan(spec) for spec in names.layer_specs(config, layer)]
    if config.is_moe(layer):
        parts = names.expert_parts(config, expert_format)
        for expert in range(config.num_experts):
            prefix = names.expert_prefix(config, layer, expert)
            planned += [_plan(part, prefix) for part in parts]
    return planned


def _one_file_per_layer(config: ModelConfig, expert_format: ExpertFormat) -> Iterator[ShardPlan]:
    count = config.num_layers + 1
    for layer in range(config.num_layers):
        name = f"model-{layer + 1:05d}-of-{count:06d}.safetensors"
        yield plan_shard(name, layer_tensors(config, layer, expert_format))
    top = [_plan(spec) for spec in names.top_specs(config)]
    yield plan_shard(f"model-{count:05d}-of-{count:06d}.safetensors", top)


def _files_in_module_order(config: ModelConfig, expert_format: ExpertFormat) -> Iterator[ShardPlan]:
    top = {spec.short: _plan(spec) for spec in names.top_specs(config)}
    ordered = [top.pop("embed")]
    head = top.pop("lm_head")
    for layer in range(config.num_layers):
        ordered += sorted(layer_tensors(config, layer, expert_format), key=_module_place)
    ordered += [*top.values(), head]
    files: list[list[TensorPlan]] = [[]]
    filled = 0
    for tensor in ordered:
        if filled + tensor.nbytes > KIMI_LINEAR_SHARD_BYTES and files[-1]:
            files.append([])
            filled = 0
        files[-1].append(tensor)
        filled += tensor.nbytes
    for i, tensors in enumerate(files, 1):
        name = f"model-{i:05d}-of-{len(files):05d}.safetensors"
        yield plan_shard(name, tensors, metadata={"format": "pt"})


def _module_place(tensor: TensorPlan) -> int:
    """Order of the modules of a layer as the release's code builds them; the norms come last."""
    places = (".self_attn.", ".experts.", ".gate.", ".shared_experts.", ".mlp.", ".input_layernorm.")
    return next((i for i, place in enumerate(places) if place in tensor.name), len(places))


def _plan(spec: TensorSpec, prefix: str = "") -> TensorPlan:
    return TensorPlan(name=prefix + spec.file_name, dtype=spec.released, shape=spec.shape)
