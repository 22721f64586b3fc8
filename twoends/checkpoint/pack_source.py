"""The bytes of the source that a block stands for; and the proof that a pack still says the same."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import TracebackType

import numpy as np

from twoends.checkpoint.index import CheckpointIndex
from twoends.checkpoint.pack_expert import decode_expert
from twoends.checkpoint.pack_index import BlockPlace, BlockPlan, PackedBlock, layers_of
from twoends.errors import CheckpointError, ReadError
from twoends.kernels.ops import Bytes
from twoends.kernels.pack_codec import unpack_rows


class SourceBytes:
    """Files of a checkpoint (and of its pack), opened when needed and read in large pieces.

    with SourceBytes(index) as source:
        source.read(plan)      -> the bytes of the shards that a block stands for
        source.stored(place)   -> the block's own bytes
    """

    def __init__(self, index: CheckpointIndex) -> None:
        self._paths = index.paths
        self._fds: dict[int, int] = {}

    def __enter__(self) -> SourceBytes:
        """Nothing is open yet."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes every file."""
        for fd in self._fds.values():
            os.close(fd)
        self._fds = {}

    def read(self, plan: BlockPlan) -> Bytes:
        """The source's bytes of a block, one tensor after another. Raises ReadError."""
        sizes = [segment.nbytes for segment in plan.source]
        data = np.empty(sum(sizes), np.uint8)
        at = 0
        for segment in plan.source:
            self._fill(segment.path_id, segment.offset, data[at : at + segment.nbytes])
            at += segment.nbytes
        return data

    def stored(self, place: BlockPlace) -> Bytes:
        """A block as it lies in the pack. Raises ReadError."""
        data = np.empty(place.num_bytes, np.uint8)
        self._fill(place.path_id, place.offset, data)
        return data

    def _fill(self, path_id: int, offset: int, into: Bytes) -> None:
        path = self._paths[path_id]
        if path_id not in self._fds:
            self._fds[path_id] = os.open(path, os.O_RDONLY)
        fd, left, at = self._fds[path_id], into.data, offset
        while left:
            try:
                count = os.preadv(fd, [left], at)
            except OSError as error:
                raise _failed(str(path), at, str(error.strerror)) from None
            if count == 0:
                raise _failed(str(path), at, "the file ends")
            left, at = left[count:], at + count
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, offset, into.size, os.POSIX_FADV_DONTNEED)


def verify_pack(index: CheckpointIndex, *, progress: Callable[[int, int], None]) -> int:
    """Compares every block of a pack with its source, byte for byte; gives the number of blocks.

    Raises CheckpointError at the first that is damaged or says anything else.
    """
    pack = index.pack
    assert pack is not None, "only a pack can be verified"
    done = 0
    with SourceBytes(index) as source:
        for layer in layers_of(index.config):
            for block in (run.block(k) for run in pack.layer(index, layer) for k in range(len(run.table))):
                stored, expected = source.stored(block.place), source.read(block.plan)
                fault = block(stored.data) or _difference(block, stored, expected, index)
                if fault is not None:
                    raise fault
                done += expected.size
                progress(done, pack.manifest.trunk_bytes + pack.manifest.experts_bytes)
    return len(pack.blocks)


def _difference(
    block: PackedBlock, stored: Bytes, expected: Bytes, index: CheckpointIndex
) -> CheckpointError | None:
    plan = block.plan
    try:
        found = stored
        if plan.is_expert:
            found = decode_expert(stored, index.expert_parts, index.expert_format)
        elif block.place.is_packed:
            found = unpack_rows(stored, rows=plan.rows, cols=plan.refs[0].shape[1]).reshape(-1).view(np.uint8)
        same = np.array_equal(found, expected)
        reason = "other bytes"
    except ValueError as error:
        same, reason = False, str(error)
    if same:
        return None
    return CheckpointError(
        f"{block.path.name} does not say what its source says: {plan.what}.",
        evidence=[
            ("pack", str(block.path)),
            ("source", str(index.paths[plan.source[0].path_id])),
            ("found", reason),
        ],
        remedies=["The source's weights may have been changed since; pack it again into a new directory."],
    )


def _failed(path: str, offset: int, reason: str) -> ReadError:
    return ReadError(
        f"reading failed: {reason}.",
        evidence=[("file", path), ("from", f"byte {offset:,}")],
        remedies=["Check the disk (dmesg, smartctl) and the file:  twoends inspect MODEL"],
    )
