"""The reader: every byte asked for arrives, or the file and the range are named."""

from __future__ import annotations

import errno
import os
import threading
import time

import pytest

from tests.engine.harness import fetched, make_read, pattern
from twoends.engine.arena import PAGE
from twoends.engine.files import read_at
from twoends.engine.reader import PIECE_BYTES, Read, aligned_size
from twoends.errors import ReadError


@pytest.mark.parametrize(
    ("offset", "num_bytes"),
    [(0, 1), (0, PAGE), (1, PAGE), (PAGE - 1, 2), (4095, 4097), (12288, 8192), (9999, 1), (5, 3 * PAGE)],
)
def test_any_range_arrives_exactly(harness, offset, num_bytes):
    data = pattern(8 * PAGE + 77)
    reader = harness.reader(harness.file(data))
    assert fetched(reader, make_read(offset, num_bytes)) == data[offset : offset + num_bytes]


@pytest.mark.parametrize("size", [1, 100, PAGE - 1, PAGE, PAGE + 1])
def test_a_file_smaller_than_a_page_is_read_to_its_last_byte(harness, size):
    data = pattern(size)
    assert fetched(harness.reader(harness.file(data)), make_read(0, size)) == data


def test_the_end_of_the_file_may_cut_the_aligned_tail_but_no_byte_asked_for(harness):
    data = pattern(PAGE + 100)
    reader = harness.reader(harness.file(data))
    assert fetched(reader, make_read(PAGE + 60, 40)) == data[-40:]
    with pytest.raises(ReadError, match="only 100 bytes came"):
        fetched(reader, make_read(PAGE + 60, 41))


def test_demand_goes_before_read_ahead(harness):
    gate = harness.gate()
    reader = harness.reader(harness.file(pattern(20 * PAGE)), read=gate, depth=1)
    ahead = [make_read(2 * k * PAGE, PAGE) for k in range(4)]
    for read in ahead:
        reader.submit(read, demand=False)
    assert gate.began.acquire(timeout=20)
    demand = [make_read(2 * k * PAGE, PAGE, kind="experts") for k in (8, 6)]
    for read in demand:
        reader.submit(read, demand=True)
    gate.open()
    for read in (*ahead, *demand):
        reader.wait(read)
    # The one that had begun is not taken back; each queue keeps its own order.
    assert [offset // (2 * PAGE) for offset in gate.offsets] == [0, 8, 6, 1, 2, 3]


def read_ahead_together(harness, reader, gate, reads):
    """Queues everything behind a read that is held back, so that one thread finds it all waiting."""
    first = make_read(60 * PAGE, PAGE)
    reader.submit(first, demand=False)
    assert gate.began.acquire(timeout=20)
    for read in reads:
        reader.submit(read, demand=False)
    gate.open()
    for read in (first, *reads):
        reader.wait(read)


@pytest.mark.parametrize("limit", [None, 5000, 2 * PAGE + 17])
def test_small_reads_that_follow_one_another_are_one_call_with_the_right_bytes(harness, monkeypatch, limit):
    """Whatever part of the run one call gives, the rest is read by itself."""
    data = pattern(64 * PAGE)
    calls = []
    gate = harness.gate()
    reader = harness.reader(harness.file(data), read=gate, depth=1, piece_bytes=8 * PAGE, direct=False)

    def run_at(path_id, buffers, offset):
        calls.append((offset // PAGE, [len(buffer) for buffer in buffers]))
        left = limit if limit is not None else 64 * PAGE
        count = 0
        for buffer in buffers:
            part = min(left - count, len(buffer))
            at = offset + count
            buffer[:part] = data[at : at + part]
            count += part
        return count

    monkeypatch.setattr(reader.files, "read_run_at", run_at)
    # Two runs with a gap between them, the first longer than a piece.
    reads = [make_read(k * PAGE + 40, PAGE - 100) for k in (*range(10), *range(20, 23))]
    read_ahead_together(harness, reader, gate, reads)
    assert calls == [(0, [PAGE] * 8), (8, [PAGE] * 2), (20, [PAGE] * 3)]
    for read in reads:
        begin = read.offset + read.head
        assert bytes(read.buffer[read.head : read.needed]) == data[begin : begin + PAGE - 100]


def test_one_bad_read_of_a_run_is_named_and_the_others_are_given(harness):
    data = pattern(64 * PAGE)
    gate = harness.gate()

    def broken(fd, buffer, offset):
        if offset == 2 * PAGE:
            raise OSError(5, "Input/output error")
        return gate(fd, buffer, offset)

    reader = harness.reader(harness.file(data), read=broken, depth=1)
    reads = [make_read(k * PAGE, PAGE) for k in range(4)]
    first = make_read(60 * PAGE, PAGE)
    reader.submit(first, demand=False)
    assert gate.began.acquire(timeout=20)
    for read in reads:
        reader.submit(read, demand=False)
    gate.open()
    for k in (0, 1, 3):
        reader.wait(reads[k])
        assert bytes(reads[k].buffer[:PAGE]) == data[k * PAGE : (k + 1) * PAGE]
    with pytest.raises(ReadError, match="Input/output error"):
        reader.wait(reads[2])


def test_several_reads_are_in_flight(harness):
    gate = harness.gate()
    reader = harness.reader(harness.file(pattern(8 * PAGE)), read=gate, depth=4)
    for k in range(8):
        reader.submit(make_read(k * PAGE, PAGE), demand=True)
    assert all(gate.began.acquire(timeout=20) for _ in range(4))
    assert not gate.began.acquire(blocking=False)


@pytest.mark.parametrize("most", [1, 1000, PAGE, PAGE + 1, 3 * PAGE - 1])
def test_short_reads_are_continued(harness, most):
    """Only a read that gives no byte more than the one before it is an error."""
    data = pattern(6 * PAGE)
    have: dict[int, int] = {}

    def short(fd, buffer, offset):
        # At each place, `most` bytes more than the last time: a device that is slow, not broken.
        have[offset] = have.get(offset, 0) + most
        return read_at(fd, buffer[: min(have[offset], len(buffer))], offset)

    # Buffered, because a system may refuse lengths that are no multiple of a block.
    reader = harness.reader(harness.file(data), read=short, direct=False)
    offset, size = (7, 5 * PAGE) if most >= PAGE else (7, 90)
    assert fetched(reader, make_read(offset, size)) == data[offset : offset + size]


def test_a_retry_starts_on_a_page_border_again(harness):
    offsets = []

    def short_once(fd, buffer, offset):
        offsets.append(offset)
        return read_at(fd, buffer, offset) if len(offsets) > 1 else min(5000, read_at(fd, buffer, offset))

    data = pattern(4 * PAGE)
    reader = harness.reader(harness.file(data), read=short_once)
    assert fetched(reader, make_read(0, 4 * PAGE)) == data
    assert offsets == [0, PAGE]


def test_a_read_that_stays_short_is_an_error_with_file_and_range(harness):
    path = harness.file(pattern(4 * PAGE), "model-00007-of-000096.safetensors")
    reader = harness.reader(path, read=lambda fd, buffer, offset: 100)
    with pytest.raises(ReadError) as caught:
        fetched(reader, make_read(PAGE, PAGE))
    assert "reading model-00007-of-000096.safetensors failed: only 100 bytes came" in caught.value.headline
    assert ("file", str(path)) in caught.value.evidence
    assert ("range", "bytes 4,096 to 8,192") in caught.value.evidence


def test_an_error_of_the_system_is_named(harness):
    def broken(fd, buffer, offset):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    reader = harness.reader(harness.file(pattern(PAGE)), read=broken)
    with pytest.raises(ReadError, match="shard-1 failed: Input/output error"):
        fetched(reader, make_read(0, 10))


def test_one_broken_piece_fails_the_whole_read_after_all_its_pieces(harness):
    """Nothing writes into the buffer any more when the error is out."""
    data = pattern(2 * PIECE_BYTES + PAGE)
    finished = []

    def second_is_broken(fd, buffer, offset):
        if offset == PIECE_BYTES:
            raise OSError(errno.EIO, "broken")
        finished.append(read_at(fd, buffer, offset))
        return finished[-1]

    reader = harness.reader(harness.file(data), read=second_is_broken, depth=1)
    with pytest.raises(ReadError, match=r"broken"):
        fetched(reader, make_read(0, len(data)))
    assert finished == [PIECE_BYTES, PAGE]


@pytest.mark.parametrize("error", [MemoryError(), ValueError("odd"), KeyboardInterrupt()])
def test_whatever_a_reader_thread_meets_reaches_the_one_who_waits(harness, error):
    """A thread that just ended would leave the main thread waiting for ever."""

    def broken(fd, buffer, offset):
        raise error

    reader = harness.reader(harness.file(pattern(PAGE)), read=broken, depth=1)
    for _ in range(2):
        with pytest.raises(type(error)):
            fetched(reader, make_read(0, 10))


class WatchedRead(Read):
    """Looks at itself at the moment it becomes done, as an unlocked `wait` may do."""

    __slots__ = ("error_when_done", "left")

    @property
    def pending(self):
        return self.left

    @pending.setter
    def pending(self, count):
        self.left = count
        if not count:
            self.error_when_done = getattr(self, "error", None)


def test_a_failed_read_never_looks_done_and_right(harness):
    reader = harness.reader(harness.file(pattern(PAGE)), read=lambda fd, buffer, offset: 0)
    plain = make_read(0, 10)
    read = WatchedRead(path_id=0, offset=0, num_bytes=10, buffer=plain.buffer, kind="trunk")
    with pytest.raises(ReadError):
        fetched(reader, read)
    assert isinstance(read.error_when_done, ReadError)


def test_a_large_read_goes_in_pieces_that_no_system_cuts(harness):
    """Linux gives at most 0x7ffff000 bytes at once and macOS refuses 2 GiB; pieces are far below both."""
    assert PIECE_BYTES < 2**30
    data = pattern(2 * PIECE_BYTES + 3 * PAGE)
    sizes = []

    def measured(fd, buffer, offset):
        sizes.append((offset, len(buffer)))
        return read_at(fd, buffer, offset)

    reader = harness.reader(harness.file(data), read=measured)
    assert fetched(reader, make_read(100, len(data) - 200)) == data[100:-100]
    assert sorted(sizes) == [(0, PIECE_BYTES), (PIECE_BYTES, PIECE_BYTES), (2 * PIECE_BYTES, 3 * PAGE)]


@pytest.mark.parametrize("piece_bytes", [PAGE, 3 * PAGE])
def test_pieces_are_as_large_as_the_reader_was_told(harness, piece_bytes):
    data = pattern(7 * PAGE + 5)
    sizes = []

    def measured(fd, buffer, offset):
        sizes.append(len(buffer))
        return read_at(fd, buffer, offset)

    reader = harness.reader(harness.file(data), read=measured, piece_bytes=piece_bytes)
    assert fetched(reader, make_read(3, len(data) - 3)) == data[3:]
    assert max(sizes) == piece_bytes
    assert len(sizes) == -(-8 * PAGE // piece_bytes) == harness.counters.num_reads


@pytest.mark.parametrize("depth", [1, 3])
def test_as_many_reads_are_in_flight_as_the_reader_was_told(harness, depth):
    gate = harness.gate()
    reader = harness.reader(harness.file(pattern(9 * PAGE)), read=gate, piece_bytes=PAGE, depth=depth)
    read = make_read(0, 9 * PAGE)
    reader.submit(read, demand=True)
    for _ in range(depth):
        assert gate.began.acquire(timeout=20)
    assert not gate.began.acquire(timeout=0.1)
    gate.open()
    reader.wait(read)


def test_read_ahead_leaves_half_of_the_disk_to_demands_until_it_is_waited_for(harness):
    gate = harness.gate()
    reader = harness.reader(harness.file(pattern(9 * PAGE)), read=gate, piece_bytes=PAGE, depth=4)
    read = make_read(0, 9 * PAGE)
    reader.submit(read, demand=False)
    for _ in range(2):
        assert gate.began.acquire(timeout=20)
    assert not gate.began.acquire(timeout=0.1)
    waiting = threading.Thread(target=reader.wait, args=(read,))
    waiting.start()
    for _ in range(2):
        assert gate.began.acquire(timeout=20)
    assert not gate.began.acquire(timeout=0.1)
    gate.open()
    waiting.join(timeout=20)
    assert not waiting.is_alive()


def test_reading_time_is_counted_once_however_many_reads_are_in_flight(harness):
    """Four reads of 0.1 s side by side are 0.1 s of reading, and 0.4 s if they were added up."""

    def slow(fd, buffer, offset):
        time.sleep(0.1)
        return read_at(fd, buffer, offset)

    reader = harness.reader(harness.file(pattern(4 * PAGE)), read=slow, piece_bytes=PAGE, depth=4)
    began = time.perf_counter()
    fetched(reader, make_read(0, 4 * PAGE))
    assert 0.1 <= harness.counters.reading_s <= time.perf_counter() - began


@pytest.mark.parametrize("kind", ["trunk", "experts", "embedding"])
def test_bytes_are_counted_by_kind_with_alignment(harness, kind):
    reader = harness.reader(harness.file(pattern(PIECE_BYTES + 9 * PAGE)))
    for offset, size in ((10, 20), (PAGE - 1, 2), (PAGE, PIECE_BYTES + PAGE)):
        fetched(reader, make_read(offset, size, kind=kind))
    expected = PAGE + 2 * PAGE + PIECE_BYTES + PAGE
    assert getattr(harness.counters, f"bytes_{kind}") == expected == harness.counters.bytes_read
    assert harness.counters.num_reads == 4


def test_waiting_is_counted_and_reads_that_are_done_cost_no_wait(harness):
    reader = harness.reader(harness.file(pattern(PAGE)))
    read = make_read(0, 100)
    fetched(reader, read)
    waited_s = harness.counters.wait_s
    reader.wait(read)
    assert harness.counters.wait_s == waited_s


def test_close_drops_what_is_queued_and_ends_the_threads(harness):
    gate = harness.gate()
    before = threading.active_count()
    reader = harness.reader(harness.file(pattern(128 * PAGE)), read=gate, depth=2)
    reads = [make_read(2 * k * PAGE, PAGE) for k in range(64)]
    for read in reads:
        reader.submit(read, demand=True)
    assert gate.began.acquire(timeout=20)
    assert gate.began.acquire(timeout=20)
    gate.open()
    reader.close()
    assert threading.active_count() == before
    assert len(gate.offsets) < 64
    harness._readers.remove(reader)


def test_waiting_on_a_closed_reader_is_an_error_not_a_wait_for_ever(harness):
    reader = harness.reader(harness.file(pattern(PAGE)))
    reader.close()
    harness._readers.remove(reader)
    read = make_read(0, 10)
    reader.submit(read, demand=True)
    with pytest.raises(ReadError, match="closed"):
        reader.wait(read)


@pytest.mark.parametrize("offset", [0, 1, 4095, 4096, 10_000])
@pytest.mark.parametrize("size", [1, 4095, 4096, 4097])
def test_the_room_of_a_range_is_its_aligned_superset(offset, size):
    pages = {byte // PAGE for byte in (offset, offset + size - 1)}
    assert aligned_size(offset, size) == (max(pages) - min(pages) + 1) * PAGE
