"""The work of `twoends inspect`: every header is read again, whatever the cached index says."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twoends.checkpoint.config import ModelConfig
from twoends.checkpoint.index import CheckpointIndex
from twoends.checkpoint.pack_file import Manifest
from twoends.checkpoint.pack_source import verify_pack
from twoends.checkpoint.safetensors import read_header
from twoends.cli.command import Values
from twoends.cli.narrate import FAMILY_NAMES
from twoends.cli.screen import Screen, columns, facts, plural, progress_bar, share_text
from twoends.engine.open import Checkpoint
from twoends.errors import OptionError
from twoends.units import format_bytes

_EXPERT_FORMATS = {"mxfp4": "MXFP4", "bf16": "BF16", "f32": "F32"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One file whose header was read and found right."""

    name: str
    file_bytes: int
    num_tensors: int


def inspect(values: Values, screen: Screen) -> None:
    """`twoends inspect`. Raises ConfigError and CheckpointError for what is not as it should be."""
    checkpoint = Checkpoint.open(Path(values.model), source=values.source)
    config, index = checkpoint.config, checkpoint.index
    if values.layer is not None and values.layer >= config.num_layers:
        raise OptionError(f"--layer is {values.layer}; this model has layers 0 to {config.num_layers - 1}.")
    if values.verify and index.pack is None:
        raise OptionError(
            f"{checkpoint.directory} is no pack; --verify compares a pack with its source.",
            remedies=["Make one:  twoends pack MODEL OUT"],
        )
    shards = check_shards(index, screen)
    verified = _verify(index, screen) if values.verify else None
    if values.json:
        found = inspect_object(checkpoint, shards, layer=values.layer)
        screen.line(json.dumps(found | {"verified_blocks": verified}))
        return
    screen.line(screen.paint(_heading(config), "bold"))
    shown = _facts(checkpoint, shards)
    if verified is not None:
        shown.append(("verified", f"{plural(verified, 'block')} equal the source, byte for byte"))
    for line in facts(shown):
        screen.line(line)
    if values.config:
        _section("config", [[name, value] for name, value in _config_rows(config)], screen)
    if values.sizes:
        rows = [[s.name, plural(s.num_tensors, "tensor"), format_bytes(s.file_bytes)] for s in shards]
        _section("shards", rows, screen, right=(1, 2))
    if values.layer is not None:
        _section(_layer_title(config, values.layer), _layer_rows(index, values.layer), screen, right=(3,))


def check_shards(index: CheckpointIndex, screen: Screen) -> list[Shard]:
    """Reads every header from the file itself. Raises CheckpointError."""
    shards = []
    for i, path in enumerate(index.shards):
        screen.live(f"  header {i + 1} of {len(index.shards)}  {path.name}")
        header = read_header(path)
        shards.append(Shard(name=path.name, file_bytes=header.file_bytes, num_tensors=len(header.names)))
    screen.clear_live()
    return shards


def _verify(index: CheckpointIndex, screen: Screen) -> int:
    def draw(done: int, total: int) -> None:
        bar = progress_bar(done / total, 30)
        screen.live(f"  comparing {bar} {format_bytes(done)} of {format_bytes(total)}")

    num_blocks = verify_pack(index, progress=draw)
    screen.clear_live()
    return num_blocks


def inspect_object(checkpoint: Checkpoint, shards: list[Shard], *, layer: int | None) -> dict[str, Any]:
    """Everything that the screens show."""
    config, index = checkpoint.config, checkpoint.index
    found: dict[str, Any] = {
        "model": str(checkpoint.directory),
        "family": config.family,
        "config": dataclasses.asdict(config),
        "fingerprint": index.fingerprint,
        "num_shards": len(shards),
        "num_tensors": index.num_tensors,
        "total_bytes": index.total_bytes,
        "expert_format": index.expert_format,
        "expert_bytes": index.expert_bytes,
        "experts_bytes": index.experts_bytes,
        "trunk_bytes": index.trunk_bytes,
        "embedding_bytes": _embedding_bytes(index),
        "vision_tensors": index.vision_tensors,
        "vision_bytes": index.vision_bytes,
        "layer_bytes": [index.layer_bytes(i) for i in range(config.num_layers)],
        "shards": [dataclasses.asdict(shard) for shard in shards],
    }
    if index.pack is not None:
        manifest = index.pack.manifest
        found["pack"] = {
            "source": str(index.directory),
            "stripes": [str(place) for place in manifest.stripe_directories(index.pack.directory)],
            "num_blocks": manifest.num_blocks,
            "trunk_bytes": manifest.trunk_bytes,
            "packed_bytes": manifest.packed_bytes,
            "code": manifest.code,
            "experts_bytes": manifest.experts_bytes,
            "packed_experts_bytes": manifest.packed_experts_bytes,
        }
    if layer is not None:
        found["layer"] = [
            {"name": ref.file_name, "dtype": ref.dtype, "shape": list(ref.shape), "bytes": ref.segment.nbytes}
            for ref in index.tensors(layer).values()
        ]
    return found


def _heading(config: ModelConfig) -> str:
    kinds = f"({len(config.kda_layers)} KDA, {len(config.mla_layers)} MLA)"
    return f"{FAMILY_NAMES[config.family]}   {plural(config.num_layers, 'layer')} {kinds}"


def _facts(checkpoint: Checkpoint, shards: list[Shard]) -> list[tuple[str, str]]:
    config, index = checkpoint.config, checkpoint.index
    num_experts = config.num_experts * len(config.moe_layers)
    one = f"{format_bytes(index.expert_bytes)}, {_EXPERT_FORMATS[index.expert_format]}"
    file_bytes = format_bytes(sum(shard.file_bytes for shard in shards))
    rows = [
        ("directory", str(checkpoint.directory)),
        ("shards", f"{plural(len(shards), 'file')}, all complete, {file_bytes}"),
        (
            "tensors",
            f"{index.num_tensors:,}, {format_bytes(index.total_bytes)}; all that the config asks for",
        ),
        ("trunk", format_bytes(index.trunk_bytes)),
        ("experts", f"{format_bytes(index.experts_bytes)}: {num_experts:,} of {one}"),
        ("embedding", format_bytes(_embedding_bytes(index))),
    ]
    if index.pack is not None:
        rows += _pack_facts(index.pack.manifest, index)
    if index.vision_tensors:
        size = format_bytes(index.vision_bytes)
        rows.append(("vision", f"{plural(index.vision_tensors, 'tensor')}, {size}, ignored: text only"))
    return [*rows, ("fingerprint", index.fingerprint)]


def _pack_facts(manifest: Manifest, index: CheckpointIndex) -> list[tuple[str, str]]:
    share = share_text(manifest.packed_bytes, manifest.trunk_bytes)
    where = f" in {len(manifest.stripes)} stripes" if len(manifest.stripes) > 1 else ""
    experts = []
    if manifest.has_experts:
        size = format_bytes(manifest.packed_experts_bytes)
        experts = [
            ("", f"{size}, {manifest.packed_experts_bytes / manifest.experts_bytes:.1%} of the experts")
        ]
    return [
        (
            "packed",
            f"{format_bytes(manifest.packed_bytes)}, {share} of the trunk, "
            f"{plural(manifest.num_blocks, 'block')}{where}, {manifest.code} code",
        ),
        *experts,
        ("source", str(index.directory)),
    ]


def _embedding_bytes(index: CheckpointIndex) -> int:
    return index.tensor(None, "embed").segment.nbytes


def _config_rows(config: ModelConfig) -> list[tuple[str, str]]:
    fields = dataclasses.asdict(config)
    fields["mla_layers"] = " ".join(map(str, config.mla_layers))
    return [(name, str(value)) for name, value in fields.items()]


def _layer_title(config: ModelConfig, layer: int) -> str:
    mixer = "MLA" if config.is_mla(layer) else "KDA"
    experts = f"{config.num_experts} experts" if config.is_moe(layer) else "dense"
    return f"layer {layer} ({mixer}, {experts})"


def _layer_rows(index: CheckpointIndex, layer: int) -> list[list[str]]:
    rows = [
        [short, ref.dtype, "x".join(map(str, ref.shape)), format_bytes(ref.segment.nbytes)]
        for short, ref in index.tensors(layer).items()
    ]
    if index.config.is_moe(layer):
        for part in index.expert_parts:
            shape = "x".join(map(str, part.shape))
            rows.append([f"each expert's {part.short}", part.released, shape, format_bytes(part.nbytes)])
    return rows


def _section(title: str, rows: list[list[str]], screen: Screen, *, right: tuple[int, ...] = ()) -> None:
    screen.line()
    screen.line(screen.paint(title, "bold"))
    for line in columns(rows, right=right):
        screen.line(line)
