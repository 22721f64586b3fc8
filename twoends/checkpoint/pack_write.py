"""Writes a pack layer by layer; what is finished is kept over a kill, a full disk, or damage found later.

A layer's block files appear under their names when they are whole (temporary name, sync, rename), then its
part of the table in OUT/.packing; the manifest comes last. A later call with the same source reads every
finished layer back, keeps those whose checksums hold and writes the others: the bytes are the same as
those of an unbroken run.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from twoends.checkpoint.index import CheckpointIndex
from twoends.checkpoint.names import ExpertFormat
from twoends.checkpoint.pack_expert import encode_expert
from twoends.checkpoint.pack_file import (
    BLOCK,
    BLOCK_BYTES,
    BORDER,
    FORMAT,
    TABLE,
    Blocks,
    Manifest,
    is_pack,
    read_manifest,
    trunk_name,
    write_manifest,
)
from twoends.checkpoint.pack_index import BlockPlan, layer_blocks, layers_of
from twoends.checkpoint.pack_source import SourceBytes
from twoends.errors import DoesNotFit, OptionError
from twoends.kernels.checksum import checksum_function
from twoends.kernels.ops import Bytes
from twoends.kernels.pack_codec import Code, pack_rows
from twoends.units import format_bytes

_WORK = ".packing"
_IDENTITY = "identity.json"
# What a pack is expected to need of its bf16 bytes, borders included; a full disk is met later if it is more.
_EXPECTED_RATIO = 0.75
_EXPECTED_EXPERT_RATIO: dict[ExpertFormat, float] = {"mxfp4": 0.97, "bf16": _EXPECTED_RATIO, "f32": 1.0}
_RESERVE_BYTES = 16 << 20

# (bytes of the trunk done, of all)
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """What was written: `kept_layers` of an earlier run are among `num_layers` (the top counts)."""

    num_layers: int
    kept_layers: int
    num_blocks: int
    raw_blocks: int
    trunk_bytes: int
    packed_bytes: int
    experts_bytes: int
    packed_experts_bytes: int


def write_pack(
    index: CheckpointIndex,
    directory: Path,
    *,
    code: Code = "entropy",
    experts: bool = False,
    stripes: tuple[Path, ...] = (),
    block_bytes: int = BLOCK_BYTES,
    progress: Progress = lambda done_bytes, all_bytes: None,
) -> Packed:
    """Packs the trunk of a checkpoint into `directory`, its blocks into `stripes` if there are any, and the
    routed `experts` if they are asked for.

    Raises OptionError for places that hold something else, and DoesNotFit before anything is written
    when the disk has too little room, or when it fills: finished layers stay for the next call.
    """
    writer = _Writer(index, directory, code, experts, stripes, block_bytes)
    try:
        return writer.run(progress)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise writer.disk_full() from None
        raise


class _Writer:
    def __init__(
        self,
        index: CheckpointIndex,
        directory: Path,
        code: Code,
        experts: bool,
        stripes: tuple[Path, ...],
        block_bytes: int,
    ) -> None:
        self._index, self._directory, self._block_bytes = index, directory, block_bytes
        self._code, self._experts = code, experts
        self._stripes = stripes or (directory,)
        self._work = directory / _WORK
        self._checksum = checksum_function()
        self._layers = layers_of(index.config)
        self._at_work = _WORK
        # the table of a finished pack that is looked through again
        self._finished: Blocks | None = None

    def run(self, progress: Progress) -> Packed:
        self._take_places()
        sizes = [[_source_bytes(plan) for plan in self._plan(i)] for i in range(len(self._layers))]
        total = sum(map(sum, sizes))
        tables: list[Blocks | None] = []
        first = 0
        for number, layer in enumerate(sizes):
            tables.append(self._kept(number, first, first + len(layer)))
            first += len(layer)
        kept = [table is not None for table in tables]
        self._check_room([number for number, there in enumerate(kept) if not there])
        done = sum(sum(layer) for layer, there in zip(sizes, kept, strict=True) if there)
        written: list[Blocks] = []
        with SourceBytes(self._index) as source:
            for number, table in enumerate(tables):
                if table is None:
                    table = self._write_layer(number, source, done, total, progress)
                    done += sum(sizes[number])
                written.append(table)
        return self._publish(np.concatenate(written), sum(kept), total)

    def _plan(self, number: int) -> list[BlockPlan]:
        """The blocks of a layer's file. Made when needed: a large model's experts are many."""
        layer = self._layers[number]
        return layer_blocks(self._index, layer, block_bytes=self._block_bytes, experts=self._experts)

    def _take_places(self) -> None:
        """Refuses places that hold anything but this very pack; removes what a killed run left."""
        identity = {
            "format": FORMAT,
            "code": self._code,
            "experts": self._experts,
            "fingerprint": self._index.fingerprint,
            "block_bytes": self._block_bytes,
            "stripes": [os.path.abspath(stripe) for stripe in self._stripes],
        }
        mine = self._identity()
        if mine is not None and mine != identity:
            differs = next(name for name in identity if mine.get(name) != identity[name])
            raise OptionError(
                f"{self._directory} has a pack of another {'model' if differs == 'fingerprint' else 'form'}.",
                evidence=[(differs, str(mine.get(differs))), ("asked for", str(identity[differs]))],
                remedies=["Nothing was written. Choose a new directory, or remove this one."],
            )
        for place in dict.fromkeys((self._directory, *self._stripes)):
            if place.exists() and not place.is_dir():
                raise OptionError(f"{place} is a file; a pack needs a new or empty directory.")
            there = sorted(path.name for path in place.iterdir()) if place.is_dir() else []
            # A kill before the identity was there leaves nothing else, so the place is as good as empty.
            if mine is None and there and not (there == [_WORK] and _only_parts(self._work)):
                raise OptionError(
                    f"{place} is not empty.",
                    evidence=[("found", ", ".join(there[:3]) + (", ..." if len(there) > 3 else ""))],
                    remedies=["Nothing was written. Choose a new directory, or an empty one."],
                )
            place.mkdir(parents=True, exist_ok=True)
            for name in there:
                if name.startswith(".") and name.endswith(".part"):
                    (place / name).unlink()
        self._work.mkdir(exist_ok=True)
        _put(self._work / _IDENTITY, json.dumps(identity).encode())

    def _identity(self) -> dict[str, object] | None:
        """What the pack in the directory, finished or not, was made from; None if there is none."""
        if is_pack(self._directory):
            manifest = read_manifest(self._directory)
            table = self._directory / TABLE
            if table.is_file() and table.stat().st_size == manifest.num_blocks * BLOCK.itemsize:
                self._finished = np.frombuffer(table.read_bytes(), BLOCK)
            places = manifest.stripe_directories(self._directory)
            return {
                "format": FORMAT,
                "code": manifest.code,
                "experts": manifest.has_experts,
                "fingerprint": manifest.fingerprint,
                "block_bytes": manifest.block_bytes,
                "stripes": [os.path.abspath(place) for place in places],
            }
        try:
            found = json.loads((self._work / _IDENTITY).read_bytes())
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def _kept(self, number: int, first: int, last: int) -> Blocks | None:
        """Rows first .. last - 1 of the table, if this layer was finished and its checksums still hold."""
        try:
            rows: Blocks = np.frombuffer(self._part(number).read_bytes(), BLOCK)
        except (FileNotFoundError, ValueError):
            if self._finished is None:
                return None
            rows = self._finished[first:last]
        if len(rows) != last - first or (rows["stripe"] >= len(self._stripes)).any():
            return None
        try:
            files = [open(stripe / trunk_name(number), "rb") for stripe in self._stripes]  # noqa: SIM115
        except FileNotFoundError:
            return None
        try:
            for offset, size, crc, stripe, _ in rows.tolist():
                data = os.pread(files[stripe].fileno(), size, offset)
                if len(data) != size or self._checksum(memoryview(data)) != crc:
                    return None
        finally:
            for file in files:
                file.close()
        return rows

    def _check_room(self, layers: list[int]) -> None:
        needed = sum(self._expected_bytes(plan) for number in layers for plan in self._plan(number))
        share = -(-needed // len(self._stripes))
        for stripe in self._stripes:
            free = shutil.disk_usage(stripe).free
            if layers and share + _RESERVE_BYTES > free:
                raise DoesNotFit(
                    f"The pack needs about {format_bytes(share)}; the disk has {format_bytes(free)} free.",
                    evidence=[("directory", str(stripe))],
                    remedies=["Nothing was packed. Choose another directory, or free some room."],
                )

    def _write_layer(
        self,
        number: int,
        source: SourceBytes,
        done: int,
        total: int,
        progress: Progress,
    ) -> Blocks:
        self._at_work = trunk_name(number)
        plans = self._plan(number)
        rows = np.zeros(len(plans), BLOCK)
        ends = [0] * len(self._stripes)
        names = [stripe / trunk_name(number) for stripe in self._stripes]
        temporary = [name.with_name(f".{name.name}.{os.getpid()}.part") for name in names]
        self._part(number).unlink(missing_ok=True)
        try:
            files = [open(name, "wb", buffering=0) for name in temporary]  # noqa: SIM115
            try:
                for i, plan in enumerate(plans):
                    data, is_packed = self._encode(plan, source)
                    # Layers begin at different stripes, or the first would hold every layer's small tensors.
                    stripe = (number + i) % len(files)
                    rows[i] = (ends[stripe], data.size, self._checksum(data.data), stripe, is_packed)
                    ends[stripe] += _append(files[stripe].fileno(), data, at=ends[stripe])
                    done += _source_bytes(plan)
                    progress(done, total)
                for file in files:
                    os.fsync(file.fileno())
            finally:
                for file in files:
                    file.close()
            for old, new in zip(temporary, names, strict=True):
                os.replace(old, new)
            _put(self._part(number), rows.tobytes())
        finally:
            for name in temporary:
                name.unlink(missing_ok=True)
        return rows

    def _encode(self, plan: BlockPlan, source: SourceBytes) -> tuple[Bytes, bool]:
        """The bytes of a block, and whether they are packed: of a matrix only where that saves a page."""
        data = source.read(plan)
        if plan.is_expert:
            index = self._index
            return encode_expert(data, index.expert_parts, index.expert_format, self._code), True
        if not plan.is_matrix or plan.refs[0].dtype != "BF16":
            return data, False
        packed = pack_rows(data.view("<u2").reshape(plan.rows, -1), code=self._code)
        if packed is None or -(-packed.size // BORDER) >= -(-data.size // BORDER):
            return data, False
        return packed, True

    def _expected_bytes(self, plan: BlockPlan) -> int:
        if plan.is_expert:
            ratio = _EXPECTED_EXPERT_RATIO[self._index.expert_format]
        else:
            ratio = _EXPECTED_RATIO if plan.is_matrix and plan.refs[0].dtype == "BF16" else 1.0
        return int(_source_bytes(plan) * ratio) + BORDER

    def _publish(self, blocks: Blocks, kept_layers: int, total: int) -> Packed:
        """The table, the small files, the manifest, in this order."""
        self._at_work = TABLE
        _put(self._directory / TABLE, blocks.tobytes())
        _copy_small_files(self._index.directory, self._directory)
        rooms = -(-blocks["bytes"].astype(np.int64) // BORDER) * BORDER
        is_expert = np.array(
            [plan.is_expert for number in range(len(self._layers)) for plan in self._plan(number)]
        )
        experts_bytes = self._index.experts_bytes if self._experts else 0
        trunk_bytes, packed_bytes = total - experts_bytes, int(rooms[~is_expert].sum())
        packed_experts_bytes = int(rooms[is_expert].sum())
        source = Path(os.path.abspath(self._index.directory))
        home = os.path.abspath(self._directory)
        write_manifest(
            self._directory,
            Manifest(
                code=self._code,
                fingerprint=self._index.fingerprint,
                source=source,
                source_relative=os.path.relpath(source, home),
                block_bytes=self._block_bytes,
                stripes=tuple(os.path.relpath(os.path.abspath(s), home) for s in self._stripes),
                num_blocks=len(blocks),
                table_crc=self._checksum(memoryview(blocks.tobytes())),
                trunk_bytes=trunk_bytes,
                packed_bytes=packed_bytes,
                experts_bytes=experts_bytes,
                packed_experts_bytes=packed_experts_bytes,
            ),
        )
        shutil.rmtree(self._work)
        return Packed(
            num_layers=len(self._layers),
            kept_layers=kept_layers,
            num_blocks=len(blocks),
            raw_blocks=int(np.count_nonzero(blocks["packed"] == 0)),
            trunk_bytes=trunk_bytes,
            packed_bytes=packed_bytes,
            experts_bytes=experts_bytes,
            packed_experts_bytes=packed_experts_bytes,
        )

    def _part(self, number: int) -> Path:
        return self._work / f"{trunk_name(number)}.blocks"

    def disk_full(self) -> DoesNotFit:
        """What is said when a write found no room."""
        places = [place for place in (self._directory, *self._stripes) if place.is_dir()]
        rows = [(str(s), f"{format_bytes(shutil.disk_usage(s).free)} free") for s in dict.fromkeys(places)]
        return DoesNotFit(
            f"The disk became full while {self._at_work} was written.",
            evidence=rows,
            remedies=[
                "There is no pack yet, and nothing half written under its name. Free some room and give",
                "the same command: finished layers are kept.",
            ],
        )


def _only_parts(directory: Path) -> bool:
    """Whether a directory has nothing but files that were never finished."""
    return all(path.name.startswith(".") and path.suffix == ".part" for path in directory.iterdir())


def _source_bytes(plan: BlockPlan) -> int:
    return sum(segment.nbytes for segment in plan.source)


def _append(fd: int, data: Bytes, *, at: int) -> int:
    """Writes a block and zeros to the next border; gives the bytes of both."""
    room = -(-data.size // BORDER) * BORDER
    padded = np.zeros(room, np.uint8)
    padded[: data.size] = data
    left, offset = padded.data, at
    while left:
        count = os.pwrite(fd, left, offset)
        left, offset = left[count:], offset + count
    return room


def _put(path: Path, data: bytes) -> None:
    """Writes a small file whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _copy_small_files(source: Path, directory: Path) -> None:
    """Config, tokenizer and whatever else is small and no weight."""
    for path in sorted(source.iterdir()):
        if path.is_file() and ".safetensors" not in path.name and not path.name.startswith("."):
            _put(directory / path.name, path.read_bytes())
