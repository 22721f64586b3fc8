"""Where the blocks of a pack lie, and what of the model each of them is."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from twoends.checkpoint import names
from twoends.checkpoint.config import ModelConfig
from twoends.checkpoint.index import CheckpointIndex, Segment, TensorRef
from twoends.checkpoint.pack_file import (
    BLOCK,
    BORDER,
    TABLE,
    Blocks,
    Manifest,
    find_source,
    read_manifest,
    trunk_name,
)
from twoends.errors import CheckpointError
from twoends.kernels.checksum import checksum_function

Checksum = Callable[[memoryview], int]

# The name of the block that holds all small tensors of a layer, and of the run of its experts.
SMALL = "small tensors"
EXPERTS = "experts"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPlan:
    """One block: rows first_row .. first_row + rows - 1 of a matrix, all small tensors of a layer, or an
    expert, whose parts in the source are `segments`."""

    layer: int
    name: str
    refs: tuple[TensorRef, ...]
    first_row: int = 0
    rows: int = 0
    expert: int = -1
    segments: tuple[Segment, ...] = ()

    @property
    def is_expert(self) -> bool:
        """Whether it is a routed expert."""
        return self.expert >= 0

    @property
    def is_matrix(self) -> bool:
        """Whether it is rows of a matrix."""
        return self.rows > 0

    @property
    def source(self) -> tuple[Segment, ...]:
        """The bytes of the source that it stands for, in its order."""
        if self.is_expert:
            return self.segments
        if not self.is_matrix:
            return tuple(ref.segment for ref in self.refs)
        segment = self.refs[0].segment
        row_bytes = segment.nbytes // self.refs[0].shape[0]
        return (
            Segment(
                path_id=segment.path_id,
                offset=segment.offset + self.first_row * row_bytes,
                nbytes=self.rows * row_bytes,
            ),
        )

    @property
    def what(self) -> str:
        """ "layer 3, kv_b_proj, rows 0 to 511"."""
        where = "the top" if self.layer < 0 else f"layer {self.layer}"
        if self.is_expert:
            return f"{where}, expert {self.expert}"
        if not self.is_matrix:
            return f"{where}, {self.name}"
        return f"{where}, {self.name}, rows {self.first_row:,} to {self.first_row + self.rows - 1:,}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """The blocks of one matrix, the one block of a layer's small tensors (`rows_per_block` 0), or one for
    each of its experts, whose parts `expert_parts` finds."""

    layer: int
    name: str
    refs: tuple[TensorRef, ...]
    short_names: tuple[str, ...]
    rows_per_block: int = 0
    num_experts: int = 0
    expert_parts: Callable[[int], tuple[Segment, ...]] | None = None

    @property
    def num_blocks(self) -> int:
        """How many they are."""
        if self.num_experts:
            return self.num_experts
        return -(-self.refs[0].shape[0] // self.rows_per_block) if self.rows_per_block else 1

    def block(self, k: int) -> BlockPlan:
        """Block k."""
        if self.expert_parts is not None:
            parts = self.expert_parts(k)
            return BlockPlan(layer=self.layer, name=self.name, refs=(), expert=k, segments=parts)
        first = k * self.rows_per_block
        rows = min(self.rows_per_block, self.refs[0].shape[0] - first)
        return BlockPlan(layer=self.layer, name=self.name, refs=self.refs, first_row=first, rows=rows)


def layer_runs(
    index: CheckpointIndex, layer: int | None, *, block_bytes: int, experts: bool
) -> Iterator[RunPlan]:
    """What a layer (or the top) is cut into, in the order of its blocks: small tensors, then every matrix,
    then its `experts` if they are packed."""
    refs = index.tensors(layer)
    refs.pop("embed", None)
    number = -1 if layer is None else layer
    small = {name: ref for name, ref in refs.items() if not names.is_matrix(name, ref.shape)}
    yield RunPlan(layer=number, name=SMALL, refs=tuple(small.values()), short_names=tuple(small))
    for name, ref in refs.items():
        if names.is_matrix(name, ref.shape):
            step = rows_per_block(index.config, name, ref, block_bytes)
            yield RunPlan(layer=number, name=name, refs=(ref,), short_names=(name,), rows_per_block=step)
    if experts and layer is not None and index.config.is_moe(layer):
        yield RunPlan(
            layer=number,
            name=EXPERTS,
            refs=(),
            short_names=(),
            num_experts=index.config.num_experts,
            expert_parts=functools.partial(index.expert, layer),
        )


def layer_blocks(
    index: CheckpointIndex, layer: int | None, *, block_bytes: int, experts: bool
) -> list[BlockPlan]:
    """The blocks of a layer (or of the top) in their order."""
    runs = layer_runs(index, layer, block_bytes=block_bytes, experts=experts)
    return [run.block(k) for run in runs for k in range(run.num_blocks)]


def rows_per_block(config: ModelConfig, name: str, ref: TensorRef, block_bytes: int) -> int:
    """Rows of all blocks of a matrix but the last: about equal shares, whole heads of kv_b_proj."""
    rows = ref.shape[0]
    group = config.nope_dim + config.value_dim if name == "kv_b_proj" else min(8, rows)
    num_blocks = max(1, -(-ref.segment.nbytes // block_bytes))
    share = -(-rows // num_blocks)
    return min(rows, -(-share // group) * group)


def layers_of(config: ModelConfig) -> list[int | None]:
    """The layers of a pack in the order of its files."""
    return [*range(config.num_layers), None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedTrunk:
    """The blocks of an open pack; `path_base` is the id of its first file among the index's paths."""

    directory: Path
    manifest: Manifest
    blocks: Blocks
    starts: tuple[int, ...]
    path_base: int
    checksum: Checksum

    def layer(self, index: CheckpointIndex, layer: int | None) -> list[BlockRun]:
        """The runs of a layer (or of the top) with their places, in their order."""
        number = len(self.starts) - 2 if layer is None else layer
        num_stripes = len(self.manifest.stripes)
        base = self.path_base + number * num_stripes
        paths = index.paths[base : base + num_stripes]
        found = []
        at = self.starts[number]
        for plan in _runs(index, layer, self.manifest):
            table = self.blocks[at : at + plan.num_blocks]
            at += plan.num_blocks
            run = BlockRun(plan=plan, table=table, path_base=base, paths=paths, checksum=self.checksum)
            found.append(run)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRun:
    """A run of blocks and where they lie. Blocks are made when asked for: a large model has many."""

    plan: RunPlan
    table: Blocks
    path_base: int
    paths: tuple[Path, ...]
    checksum: Checksum

    def block(self, k: int) -> PackedBlock:
        """Block k with its place."""
        offset, size, crc, stripe, packed = self.table[k].tolist()
        place = BlockPlace(self.path_base + stripe, offset, size, crc, bool(packed))
        path = self.paths[stripe]
        return PackedBlock(plan=self.plan.block(k), place=place, path=path, checksum=self.checksum)

    def is_packed(self, k: int) -> bool:
        """Whether block k is packed, or as the source has it."""
        return bool(self.table["packed"][k])

    def rooms(self) -> NDArray[np.int64]:
        """Bytes of the device for each block."""
        rooms: NDArray[np.int64] = -(-self.table["bytes"].astype(np.int64) // BORDER) * BORDER
        return rooms

    def small_refs(self) -> tuple[tuple[str, TensorRef], ...]:
        """The small tensors of the one block by short name, with their places in the pack."""
        place = self.block(0).place
        at = place.offset
        found = []
        for name, ref in zip(self.plan.short_names, self.plan.refs, strict=True):
            moved = Segment(path_id=place.path_id, offset=at, nbytes=ref.segment.nbytes)
            found.append((name, dataclasses.replace(ref, segment=moved)))
            at += ref.segment.nbytes
        return tuple(found)


@dataclass(frozen=True, slots=True)
class BlockPlace:
    """Where a block lies among the index's paths, and its checksum."""

    path_id: int
    offset: int
    num_bytes: int
    crc: int
    is_packed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBlock:
    """A block with its place; called with the bytes that were read, it compares them with its checksum."""

    plan: BlockPlan
    place: BlockPlace
    path: Path
    checksum: Checksum

    def __call__(self, data: memoryview) -> CheckpointError | None:
        """The error that names the block, or None if it is as it was written."""
        found = self.checksum(data)
        if found == self.place.crc:
            return None
        end = self.place.offset + self.place.num_bytes
        return CheckpointError(
            f"{self.path.name} is damaged: {self.plan.what}.",
            evidence=[
                ("file", str(self.path)),
                ("range", f"bytes {self.place.offset:,} to {end:,}"),
                ("expected", f"CRC-32 {self.place.crc:08x}"),
                ("found", f"CRC-32 {found:08x}"),
            ],
            remedies=[
                "No text came from these bytes. Write this layer again, and keep the others:",
                "  twoends pack MODEL OUT",
            ],
        )


def open_pack(
    directory: Path,
    config: ModelConfig,
    *,
    source: Path | None = None,
    run_config: ModelConfig | None = None,
) -> CheckpointIndex:
    """The source's index with the trunk's places in the pack. Raises CheckpointError.

    `config` is the pack's own; `run_config` is that with a named choice, which changes the fingerprint.
    """
    manifest = read_manifest(directory)
    place = find_source(directory, manifest, source)
    index = CheckpointIndex.open(place, config)
    if index.fingerprint != manifest.fingerprint:
        raise CheckpointError(
            f"{place} is not the checkpoint that this pack was made from.",
            evidence=[
                ("pack", str(directory)),
                ("expected", f"fingerprint {manifest.fingerprint}"),
                ("found", f"fingerprint {index.fingerprint}"),
            ],
            remedies=["Say where the right one is:  --source DIR", "Or pack this one anew."],
        )
    if run_config is not None:
        index = CheckpointIndex.open(place, run_config)
    checksum = checksum_function()
    starts = _starts(index, manifest)
    blocks = _read_table(directory / TABLE, manifest, checksum)
    if starts[-1] != manifest.num_blocks:
        raise _bad_table(directory / TABLE, f"{starts[-1]:,} blocks", f"{manifest.num_blocks:,} blocks")
    files = [
        stripe / trunk_name(number)
        for number in range(config.num_layers + 1)
        for stripe in manifest.stripe_directories(directory)
    ]
    sizes = _check_files(files, blocks, starts, len(manifest.stripes))
    pack = PackedTrunk(
        directory=directory,
        manifest=manifest,
        blocks=blocks,
        starts=starts,
        path_base=len(index.paths),
        checksum=checksum,
    )
    return dataclasses.replace(
        index, paths=(*index.paths, *files), file_sizes=(*index.file_sizes, *sizes), pack=pack
    )


def _runs(index: CheckpointIndex, layer: int | None, manifest: Manifest) -> Iterator[RunPlan]:
    return layer_runs(index, layer, block_bytes=manifest.block_bytes, experts=manifest.has_experts)


def _starts(index: CheckpointIndex, manifest: Manifest) -> tuple[int, ...]:
    """First block of each layer; one more entry for the end."""
    starts = [0]
    for layer in layers_of(index.config):
        runs = _runs(index, layer, manifest)
        starts.append(starts[-1] + sum(run.num_blocks for run in runs))
    return tuple(starts)


def _read_table(path: Path, manifest: Manifest, checksum: Checksum) -> Blocks:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise _bad_table(path, "the table of blocks", str(error.strerror)) from None
    found = checksum(memoryview(data))
    if len(data) != manifest.num_blocks * BLOCK.itemsize or found != manifest.table_crc:
        raise _bad_table(path, f"CRC-32 {manifest.table_crc:08x}", f"CRC-32 {found:08x}")
    return np.frombuffer(data, BLOCK)


def _check_files(files: list[Path], blocks: Blocks, starts: tuple[int, ...], num_stripes: int) -> list[int]:
    """Every block file must be there and reach to the end of its last block."""
    sizes = []
    for i, path in enumerate(files):
        rows = blocks[starts[i // num_stripes] : starts[i // num_stripes + 1]]
        mine = rows[rows["stripe"] == i % num_stripes]
        needed = int((mine["offset"] + mine["bytes"]).max()) if len(mine) else 0
        try:
            sizes.append(path.stat().st_size)
        except OSError:
            raise _lost(path, needed, "no such file") from None
        if sizes[-1] < needed:
            raise _lost(path, needed, f"{sizes[-1]:,} bytes")
    return sizes


def _lost(path: Path, needed: int, found: str) -> CheckpointError:
    return CheckpointError(
        f"{path.name} of the pack is {'missing' if found.startswith('no') else 'short'}.",
        evidence=[("file", str(path)), ("expected", f"{needed:,} bytes"), ("found", found)],
        remedies=["Write it again, and keep the others:  twoends pack MODEL OUT"],
    )


def _bad_table(path: Path, expected: str, found: str) -> CheckpointError:
    return CheckpointError(
        f"{path.name} is not the table of this pack's blocks.",
        evidence=[("file", str(path)), ("expected", expected), ("found", found)],
        remedies=["Write it again:  twoends pack MODEL OUT"],
    )
