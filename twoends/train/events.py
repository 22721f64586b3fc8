"""TensorBoard event files, written without its package: a log of records that each hold one Event message.

record   length u64, masked CRC-32C of it, data, masked CRC-32C of the data (TFRecord)
Event    1: wall time (double), 2: step (int64), 3: file version, 5: Summary, 7: SessionLog (1: START)
Summary  1: repeated Value with 1: tag, 2: simple value (float)

To look at them: pip install tensorboard; tensorboard --logdir OUT/events
"""

from __future__ import annotations

import struct
import time
from collections.abc import Mapping
from pathlib import Path

_CASTAGNOLI = 0x82F63B78
_VERSION = b"brain.Event:2"


class EventFile:
    """Scalars by step, appended and flushed one step at a time; a new file for each part of a run."""

    def __init__(self, folder: Path, *, first_step: int) -> None:
        """`first_step` is the next to come; TensorBoard forgets what an earlier part said of it and later."""
        folder.mkdir(parents=True, exist_ok=True)
        now = time.time_ns()
        self._crcs = _crc_table()
        self._file = (folder / f"events.out.tfevents.{now // 10**9:010d}.{now % 10**9:09d}").open("wb")
        self._record(_event(first_step - 1, _bytes(3, _VERSION)))
        self._record(_event(first_step, _bytes(7, _varint(1 << 3) + _varint(1))))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """One Event with a value for each tag."""
        summary = b"".join(
            _bytes(1, _bytes(1, tag.encode()) + _key(2, 5) + struct.pack("<f", value))
            for tag, value in values.items()
        )
        self._record(_event(step, _bytes(5, summary)))

    def close(self) -> None:
        """The end of this part."""
        self._file.close()

    def _record(self, data: bytes) -> None:
        length = struct.pack("<Q", len(data))
        self._file.write(length + self._crc(length) + data + self._crc(data))
        self._file.flush()

    def _crc(self, data: bytes) -> bytes:
        crc = 0xFFFFFFFF
        for byte in data:
            crc = self._crcs[(crc ^ byte) & 0xFF] ^ (crc >> 8)
        crc ^= 0xFFFFFFFF
        return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _crc_table() -> list[int]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (_CASTAGNOLI if value & 1 else 0)
        table.append(value)
    return table


def _event(step: int, rest: bytes) -> bytes:
    return _key(1, 1) + struct.pack("<d", time.time()) + _key(2, 0) + _varint(max(0, step)) + rest


def _key(field: int, wire: int) -> bytes:
    return _varint(field << 3 | wire)


def _bytes(field: int, data: bytes) -> bytes:
    return _key(field, 2) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
