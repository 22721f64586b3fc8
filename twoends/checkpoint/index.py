"""CheckpointIndex: where every tensor of a checkpoint lies. Everything wrong is refused at open.

index = CheckpointIndex.open(directory, read_config(directory))
index.tensor(3, "kv_b_proj")    -> TensorRef(segment, shape, dtype, file_name)
index.expert(5, 811)            -> its segments, in the order of names.expert_parts
index.paths[segment.path_id]    -> the file to read segment.nbytes bytes at segment.offset from
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from twoends.checkpoint import index_cache, names
from twoends.checkpoint.config import ModelConfig
from twoends.checkpoint.index_file import INDEX_NAME, IndexCensus, NameSum, names_in_shard, read_census
from twoends.checkpoint.index_tables import ROW_DTYPES, TableBuilder, Tables, row_starts
from twoends.checkpoint.names import DType, ExpertFormat, TensorSpec
from twoends.checkpoint.safetensors import ShardHeader, fetch_again, read_header
from twoends.errors import CheckpointError

if TYPE_CHECKING:
    from twoends.checkpoint.pack_index import PackedTrunk

SINGLE_NAME = "model.safetensors"
# Below this many tensors an index is built faster than a cached one is worth keeping.
_CACHE_FROM_TENSORS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A run of bytes: `nbytes` at absolute `offset` of file `path_id`."""

    path_id: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRef:
    """One tensor in its file."""

    segment: Segment
    shape: tuple[int, ...]
    dtype: DType
    file_name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointIndex:
    """The places of all text tensors of one checkpoint directory."""

    directory: Path
    config: ModelConfig
    paths: tuple[Path, ...]
    file_sizes: tuple[int, ...]
    # tells checkpoints apart: config, shard sizes and headers; not the directory, not the weights' bytes
    fingerprint: str
    tables: Tables
    starts: tuple[int, ...]
    # where the trunk's blocks are, if the model was opened from a pack; `paths` then ends with its files
    pack: PackedTrunk | None = None

    @classmethod
    def open(
        cls, directory: Path, config: ModelConfig, *, cache_from: int = _CACHE_FROM_TENSORS
    ) -> CheckpointIndex:
        """Reads every shard's header, or the cached index of unchanged shards.

        An index of `cache_from` tensors or more is kept in the user's cache directory. Raises
        CheckpointError for anything that isn't as the format and the config say.
        """
        directory = Path(directory)
        shards = _shard_files(directory)
        key = index_cache.cache_key(directory, shards, config)
        kept = index_cache.load(key)
        if kept is None:
            kept = _build(directory, shards, config)
            if kept[0].num_tensors >= cache_from:
                index_cache.save(key, *kept)
        tables, digests = kept
        sizes = tuple(size for _, size, _ in key["shards"])
        text = "\n".join([config.digest, *(f"{s} {d}" for s, d in zip(sizes, digests, strict=True))])
        return cls(
            directory=directory,
            config=config,
            paths=shards,
            file_sizes=sizes,
            fingerprint=hashlib.blake2b(text.encode("ascii"), digest_size=16).hexdigest(),
            tables=tables,
            starts=tuple(row_starts(config)),
        )

    @property
    def shards(self) -> tuple[Path, ...]:
        """The checkpoint's own weight files, without those of a pack."""
        return self.paths if self.pack is None else self.paths[: self.pack.path_base]

    def tensor(self, layer: int | None, short_name: str) -> TensorRef:
        """The tensor called `short_name` in names.py, of a layer or (None) of the top.

        Raises KeyError if layers of this kind have none of that name.
        """
        for row, spec in self._specs(layer):
            if spec.short == short_name:
                return self._ref(row, spec)
        where = "the top" if layer is None else f"layer {layer}"
        known = ", ".join(spec.short for _, spec in self._specs(layer))
        raise KeyError(f"{where} has no tensor '{short_name}'; it has {known}")

    def tensors(self, layer: int | None) -> dict[str, TensorRef]:
        """Every tensor of a layer (or of the top) but routed experts, in the order of use."""
        return {spec.short: self._ref(row, spec) for row, spec in self._specs(layer)}

    def expert(self, layer: int, expert_id: int) -> tuple[Segment, ...]:
        """The segments of one routed expert in the order of names.expert_parts. Raises IndexError."""
        cell = layer - self.config.num_dense_layers
        if cell < 0 or expert_id < 0:
            raise IndexError(f"layer {layer} has no expert {expert_id}")
        offsets = self.tables.expert_offset_LEP[cell, expert_id].tolist()
        path_ids = self.tables.expert_path_LEP[cell, expert_id].tolist()
        return tuple(
            Segment(path_id=path_id, offset=offset, nbytes=part.nbytes)
            for path_id, offset, part in zip(path_ids, offsets, self.expert_parts, strict=True)
        )

    @property
    def expert_parts(self) -> tuple[TensorSpec, ...]:
        """Shapes and dtypes of an expert's segments."""
        return names.expert_parts(self.config, self.expert_format)

    @property
    def expert_format(self) -> ExpertFormat:
        """How routed experts are stored, decided by the tensors that are there."""
        return self.tables.expert_format

    @property
    def expert_bytes(self) -> int:
        """Bytes of one routed expert."""
        return sum(part.nbytes for part in self.expert_parts)

    @property
    def experts_bytes(self) -> int:
        """Bytes of all routed experts."""
        return self.expert_bytes * len(self.config.moe_layers) * self.config.num_experts

    @property
    def num_tensors(self) -> int:
        """Tensors in the shards, vision included."""
        return self.tables.num_tensors

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors in the shards, vision included."""
        return self.tables.payload_bytes

    @property
    def trunk_bytes(self) -> int:
        """Bytes of all text tensors but routed experts and the embedding."""
        return int(self.tables.row_bytes().sum()) - self.tensor(None, "embed").segment.nbytes

    @property
    def vision_tensors(self) -> int:
        """Tensors that are there but not run: vision tower and projector."""
        return self.tables.vision_tensors

    @property
    def vision_bytes(self) -> int:
        """Bytes of the vision tensors."""
        return self.tables.vision_bytes

    @property
    def nbytes(self) -> int:
        """Memory that this index holds in its tables."""
        tables = self.tables
        arrays = (tables.row_path, tables.row_offset, tables.row_dtype, tables.row_shape)
        return sum(array.nbytes for array in (*arrays, tables.expert_path_LEP, tables.expert_offset_LEP))

    def layer_bytes(self, layer: int) -> int:
        """Bytes of one layer without its routed experts."""
        first, last = self.starts[layer], self.starts[layer + 1]
        return int(self.tables.row_bytes()[first:last].sum())

    def _specs(self, layer: int | None) -> list[tuple[int, TensorSpec]]:
        if layer is None:
            return list(enumerate(names.top_specs(self.config)))
        if not 0 <= layer < self.config.num_layers:
            raise KeyError(f"there is no layer {layer}; the model has 0..{self.config.num_layers - 1}")
        return list(enumerate(names.layer_specs(self.config, layer), self.starts[layer]))

    def _ref(self, row: int, spec: TensorSpec) -> TensorRef:
        tables = self.tables
        dtype = ROW_DTYPES[tables.row_dtype[row]]
        shape = tables.shapes[tables.row_shape[row]]
        segment = Segment(
            path_id=int(tables.row_path[row]),
            offset=int(tables.row_offset[row]),
            nbytes=names.num_values(shape) * names.DTYPE_BYTES[dtype],
        )
        return TensorRef(segment=segment, shape=shape, dtype=dtype, file_name=spec.file_name)


def _shard_files(directory: Path) -> tuple[Path, ...]:
    """The weight files of a directory, by name; an index must stand beside several."""
    if not directory.is_dir():
        raise CheckpointError(
            f"{directory} is not a directory.", remedies=["MODEL is a checkpoint's directory."]
        )
    # A link to a file that is gone counts as missing.
    shards = tuple(sorted(path for path in directory.glob("*.safetensors") if path.is_file()))
    if (directory / INDEX_NAME).exists() or [path.name for path in shards] == [SINGLE_NAME]:
        return shards
    found = ", ".join(path.name for path in shards[:4]) + (", ..." if len(shards) > 4 else "")
    raise CheckpointError(
        f"{directory} has no {INDEX_NAME}." if shards else f"{directory} has no weights.",
        evidence=[
            ("expected", f"{INDEX_NAME} and its shards, or {SINGLE_NAME} alone"),
            ("found", found or "no file named *.safetensors"),
        ],
        remedies=["Without the index a missing shard can't be noticed; fetch it again."],
    )


def _build(directory: Path, shards: tuple[Path, ...], config: ModelConfig) -> tuple[Tables, list[str]]:
    """Reads all headers, one at a time, and holds the index file against them."""
    index_path = directory / INDEX_NAME
    census = read_census(index_path) if index_path.exists() else None
    if census is not None:
        _check_files(census, shards, index_path)
    builder = TableBuilder(config)
    digests = []
    payload_bytes = 0
    for path_id, path in enumerate(shards):
        header = read_header(path)
        if census is not None:
            _check_shard(header, census.shards[path.name], index_path)
        builder.add(header, path_id=path_id)
        digests.append(header.digest.hex())
        payload_bytes += header.payload_bytes
    promised = payload_bytes if census is None else census.total_size
    if promised is not None and promised != payload_bytes:
        raise CheckpointError(
            f"The shards hold {payload_bytes:,} bytes of tensors; {INDEX_NAME} promises {promised:,}.",
            evidence=[("file", str(index_path)), ("field", "metadata.total_size")],
            remedies=[f"The shards or {INDEX_NAME} are of another version; fetch them again."],
        )
    return builder.finish(), digests


def _check_files(census: IndexCensus, shards: tuple[Path, ...], index_path: Path) -> None:
    """The index must name exactly the shards that are there."""
    there = {path.name for path in shards}
    absent = sorted(set(census.shards) - there)
    if absent:
        lost = names_in_shard(index_path, absent[0])
        layers = sorted({layer for layer in map(names.layer_of, lost) if layer is not None})
        rows = [("file", str(index_path.with_name(absent[0])))]
        if len(absent) > 1:
            rows.append(("missing in all", f"{len(absent)} of {len(census.shards)}: {', '.join(absent[:4])}"))
        rows.append(("tensors in it", f"{len(lost):,}, first {lost[0]}"))
        if layers:
            rows.append(("layers in it", ", ".join(map(str, layers[:8]))))
        raise CheckpointError(
            f"{absent[0]} is missing; {INDEX_NAME} names it.",
            evidence=rows,
            remedies=fetch_again(Path(absent[0])),
        )
    extra = sorted(there - set(census.shards))
    if extra:
        raise CheckpointError(
            f"{extra[0]} is not in {INDEX_NAME}.",
            evidence=[
                ("index", str(index_path)),
                ("shards", f"{len(there)} found, {len(census.shards)} named"),
            ],
            remedies=["It may be of another version; remove it, or fetch the index again."],
        )


def _check_shard(header: ShardHeader, promised: NameSum, index_path: Path) -> None:
    """One shard's names must be those that the index gives it."""
    found = NameSum()
    for name in header.names:
        found.add(name)
    if found == promised:
        return
    listed = names_in_shard(index_path, header.path.name)
    rows = [
        ("file", str(header.path)),
        ("expected", f"{len(listed):,} tensors ({INDEX_NAME})"),
        ("found", f"{len(header.names):,} tensors (the shard's header)"),
    ]
    lost = sorted(set(listed) - set(header.names))
    extra = sorted(set(header.names) - set(listed))
    if lost:
        rows.append(("only in the index", _first_of(lost)))
    if extra:
        rows.append(
            ("only in the shard", f"{extra[0]} and {len(extra) - 1:,} more" if extra[1:] else extra[0])
        )
    if not lost and not extra:
        rows.append(("named twice in the index", next(n for n in listed if listed.count(n) > 1)))
    raise CheckpointError(
        f"{header.path.name} does not hold the tensors that {INDEX_NAME} says.",
        evidence=rows,
        remedies=fetch_again(header.path),
    )


def _first_of(found: list[str]) -> str:
    return found[0] if len(found) == 1 else f"{found[0]} and {len(found) - 1:,} more"
