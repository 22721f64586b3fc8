"""Writes checkpoints in the released layout, never more than one piece of a tensor in memory.

A file appears under its name only when it is whole (temporary name, then rename), and the index
comes last: a run that is cut off leaves nothing that could be taken for a checkpoint.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twoends.checkpoint.index_file import INDEX_NAME
from twoends.checkpoint.layout import ShardPlan, TensorPlan
from twoends.errors import DoesNotFit
from twoends.units import format_bytes

# A tensor's values in file order, in pieces of any size.
Pieces = Iterable[NDArray[Any]]

# What a file system keeps back, and the small files beside the shards.
_RESERVE_BYTES = 16 << 20


class ShardWriter:
    """Writes one file of a plan; tensors may come in any order and in pieces.

        with ShardWriter(directory, plan) as shard:
            shard.write("model.norm.weight", array)

    Tensors named in `sparse` are left as holes, which read as zeros and take no room. The file
    appears when the block ends without an error. Raises DoesNotFit when the disk is full.
    """

    def __init__(self, directory: Path, plan: ShardPlan, *, sparse: Collection[str] = ()) -> None:
        self.path = Path(directory) / plan.file_name
        self._temporary = self.path.with_name(f".{plan.file_name}.{os.getpid()}.part")
        self._plan = plan
        self._sparse = sparse
        self._left: dict[str, tuple[int, int]] = {}
        begin = len(plan.header)
        for tensor in plan.tensors:
            self._left[tensor.name] = (begin, begin + tensor.nbytes)
            begin += tensor.nbytes

    def __enter__(self) -> ShardWriter:
        self._fd = os.open(self._temporary, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o644)
        try:
            os.truncate(self._fd, self._plan.file_bytes)
            self._put(memoryview(self._plan.header), 0)
        except BaseException:
            self._discard()
            raise
        return self

    def write(self, name: str, values: NDArray[Any]) -> None:
        """The next piece of one tensor: contiguous values whose bytes are what the file holds."""
        begin, end = self._left[name]
        data = np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
        if begin + len(data) > end:
            raise ValueError(f"{name} has {end - begin} bytes left to write, not {len(data)}")
        self._put(data, begin)
        self._left[name] = (begin + len(data), end)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._check_whole()
                os.fsync(self._fd)
                os.replace(self._temporary, self.path)
        finally:
            self._discard()

    def _discard(self) -> None:
        """Closes the file; removes it if it was not renamed."""
        os.close(self._fd)
        self._temporary.unlink(missing_ok=True)

    def _check_whole(self) -> None:
        for name, (begin, end) in self._left.items():
            if begin < end and name not in self._sparse:
                raise ValueError(f"{name} lacks {end - begin} bytes in {self.path.name}")

    def _put(self, data: memoryview, offset: int) -> None:
        while data:
            try:
                written = os.pwrite(self._fd, data[: 1 << 30], offset)
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise self._disk_full() from None
                raise
            data = data[written:]
            offset += written

    def _disk_full(self) -> DoesNotFit:
        free = shutil.disk_usage(self.path.parent).free
        return DoesNotFit(
            f"The disk became full while {self.path.name} was written.",
            evidence=[
                ("file", str(self.path)),
                ("needs", format_bytes(self._plan.file_bytes)),
                ("free now", format_bytes(free)),
            ],
            remedies=["Nothing half written is left under its name. Free some room, then write again."],
        )


def check_room(directory: Path, needed_bytes: int) -> None:
    """Raises DoesNotFit if the disk under `directory` has not that many bytes free."""
    free = shutil.disk_usage(directory).free
    if needed_bytes + _RESERVE_BYTES > free:
        raise DoesNotFit(
            f"The checkpoint needs {format_bytes(needed_bytes)}; the disk has {format_bytes(free)} free.",
            evidence=[("directory", str(directory))],
            remedies=["Nothing was written. Choose another directory, or free some room."],
        )


def write_checkpoint(
    directory: Path,
    plans: Sequence[ShardPlan],
    source: Callable[[TensorPlan], Pieces],
    *,
    is_sparse: Callable[[str], bool] = lambda name: False,
    progress: Callable[[int, int], None] = lambda done_bytes, total_bytes: None,
) -> None:
    """Writes every shard of `plans`, then the index; `source` gives a tensor's values in pieces.

    Tensors whose name `is_sparse` accepts are left as holes. `progress(done_bytes, total_bytes)` is
    called after each piece. Raises DoesNotFit before anything is written, or when the disk fills.
    """
    directory.mkdir(parents=True, exist_ok=True)
    total = sum(tensor.nbytes for plan in plans for tensor in plan.tensors if not is_sparse(tensor.name))
    check_room(directory, total + sum(len(plan.header) for plan in plans))
    done = 0
    for plan in plans:
        sparse = {tensor.name for tensor in plan.tensors if is_sparse(tensor.name)}
        with ShardWriter(directory, plan, sparse=sparse) as shard:
            for tensor in plan.tensors:
                if tensor.name in sparse:
                    continue
                for piece in source(tensor):
                    shard.write(tensor.name, piece)
                    done += piece.nbytes
                    progress(done, total)
    write_index(directory, plans)


def write_index(directory: Path, plans: Sequence[ShardPlan]) -> None:
    """Writes model.safetensors.index.json for shards that are there."""
    weight_map = {tensor.name: plan.file_name for plan in plans for tensor in plan.tensors}
    total_size = sum(plan.payload_bytes for plan in plans)
    index = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
    write_text(directory / INDEX_NAME, json.dumps(index, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Writes a small file whole or not at all. Raises DoesNotFit when the disk is full."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        temporary.write_text(text, encoding="utf-8", newline="\n")
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DoesNotFit(f"The disk is full: {path} can't be written.") from None
        raise
