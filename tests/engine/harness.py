"""A reader over small files whose bytes are known, with faults and stops where a test wants them."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np

from twoends.engine.arena import Arena
from twoends.engine.files import WeightFiles, read_at
from twoends.engine.reader import PIECE_BYTES, Read, Reader, aligned_size
from twoends.engine.trace import Counters, Trace


def pattern(num_bytes: int, seed: int = 0) -> bytes:
    """Bytes that repeat nowhere near, so that a wrong offset shows."""
    return np.random.default_rng(seed).integers(0, 256, num_bytes, np.uint8).tobytes()


class Gate:
    """A `read=` seam that holds every read back until `open`, and remembers their order."""

    def __init__(self) -> None:
        self.offsets: list[int] = []
        self.began = threading.Semaphore(0)
        self._open = threading.Event()

    def __call__(self, fd: int, buffer: memoryview, offset: int) -> int:
        self.offsets.append(offset)
        self.began.release()
        assert self._open.wait(20)
        return read_at(fd, buffer, offset)

    def open(self) -> None:
        self._open.set()


class Harness:
    """Everything a reader needs, made on the spot and closed together."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._readers: list[Reader] = []
        self._gates: list[Gate] = []
        self.counters = Counters()

    def file(self, data: bytes, name: str = "shard-1") -> Path:
        path = self._directory / name
        path.write_bytes(data)
        return path

    def gate(self) -> Gate:
        self._gates.append(Gate())
        return self._gates[-1]

    def reader(
        self, *paths: Path, read=read_at, depth: int = 4, piece_bytes: int = PIECE_BYTES, direct: bool = True
    ) -> Reader:
        self.counters = Counters()
        files = WeightFiles(paths, direct=direct, read=read)
        reader = Reader(files, counters=self.counters, trace=Trace(), depth=depth, piece_bytes=piece_bytes)
        self._readers.append(reader)
        return self._readers[-1]

    def close(self) -> None:
        for gate in self._gates:
            gate.open()
        for reader in self._readers:
            reader.close()


def make_read(offset: int, num_bytes: int, *, path_id: int = 0, kind="trunk") -> Read:
    """A read into a poisoned buffer of its own."""
    room = aligned_size(offset, num_bytes)
    return Read(
        path_id=path_id,
        offset=offset,
        num_bytes=num_bytes,
        buffer=Arena(room).view(0, room),
        kind=kind,
    )


def fetched(reader: Reader, read: Read, *, demand: bool = True) -> bytes:
    """The bytes that were asked for, as soon as they are there."""
    reader.submit(read, demand=demand)
    reader.wait(read)
    return bytes_of(read)


def bytes_of(read: Read) -> bytes:
    """The bytes that were asked for, without what alignment added."""
    return bytes(read.buffer[read.head : read.needed])
