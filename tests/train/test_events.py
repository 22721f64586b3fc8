"""TensorBoard's files: read back by a reader of the same format, and by TensorBoard where it is installed."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from twoends.train.events import EventFile


def _records(path: Path) -> list[bytes]:
    data, found = path.read_bytes(), []
    while data:
        (length,) = struct.unpack_from("<Q", data)
        found.append(data[12 : 12 + length])
        data = data[16 + length :]
    return found


def test_the_first_record_is_the_known_one_of_the_format(tmp_path: Path) -> None:
    EventFile(tmp_path, first_step=1).close()
    (path,) = tmp_path.iterdir()
    version, start = _records(path)
    assert version.endswith(b"\x1a\rbrain.Event:2")
    assert start.endswith(b"\x10\x01\x3a\x02\x08\x01")


def test_a_checksum_is_the_castagnoli_one_masked(tmp_path: Path) -> None:
    events = EventFile(tmp_path, first_step=1)
    # CRC-32C of "123456789" is 0xe3069283 (RFC 3720).
    crc = 0xE3069283
    masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
    assert events._crc(b"123456789") == struct.pack("<I", masked)
    events.close()


def test_a_scalar_is_a_tag_and_a_number_under_its_step(tmp_path: Path) -> None:
    events = EventFile(tmp_path, first_step=300)
    events.scalars(300, {"loss": 2.5})
    events.close()
    (path,) = tmp_path.iterdir()
    last = _records(path)[-1]
    assert last[9:12] == b"\x10\xac\x02"
    assert last.endswith(b"\x0a\x04loss\x15" + struct.pack("<f", 2.5))


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    module = "tensorboard.backend.event_processing.event_accumulator"
    accumulator = pytest.importorskip(module, reason="tensorboard is not installed")
    for first in (1, 3):
        events = EventFile(tmp_path, first_step=first)
        for step in range(first, first + 4):
            events.scalars(step, {"loss": 10.0 * first + step})
        events.close()
    found = accumulator.EventAccumulator(str(tmp_path)).Reload().Scalars("loss")
    assert [(event.step, event.value) for event in found] == [
        (1, 11.0), (2, 12.0), (3, 33.0), (4, 34.0), (5, 35.0), (6, 36.0)
    ]  # fmt: skip
