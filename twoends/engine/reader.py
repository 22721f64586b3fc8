"""Reads in flight: a few threads, demand before read-ahead, every byte counted.

A job is one aligned positional read of at most one piece, or of several small ones that follow one
another in a file; a short read is continued, and what stays short is an error that names the file.
The interpreter lock is released while a read waits, so arithmetic goes on.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from twoends.engine.arena import PAGE, align_down, align_up
from twoends.engine.files import WeightFiles
from twoends.engine.trace import Counters, Trace
from twoends.errors import ReadError, TwoendsError

Kind = Literal["trunk", "experts", "embedding"]

# Looks at bytes that were read; gives the error if they are not what was written.
Check = Callable[[memoryview], TwoendsError | None]

PIECE_BYTES = 4 * 2**20
DEPTH = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadShape:
    """How a device is read: the largest single read, and how many are in flight. Changes no bit."""

    piece_bytes: int = PIECE_BYTES
    depth: int = DEPTH


class Read:
    """One contiguous range of a file on its way into `buffer`; done when `pending` is 0."""

    __slots__ = (
        "awaited",
        "buffer",
        "check",
        "error",
        "head",
        "kind",
        "needed",
        "offset",
        "path_id",
        "pending",
    )

    def __init__(
        self,
        *,
        path_id: int,
        offset: int,
        num_bytes: int,
        buffer: memoryview,
        kind: Kind,
        check: Check | None = None,
    ) -> None:
        """`buffer` has room for the aligned superset; the bytes asked for begin at `head` in it.

        `check` is called with exactly those by the thread that read them, before anyone gets them.
        """
        self.path_id = path_id
        self.offset = align_down(offset)
        self.head = offset - self.offset
        self.needed = self.head + num_bytes
        self.buffer = buffer[: align_up(self.needed)]
        self.kind = kind
        self.check = check
        self.pending = 0
        self.awaited = False
        self.error: BaseException | None = None


# A read, where in its buffer, and how many bytes.
Piece = tuple[Read, int, int]


def aligned_size(offset: int, num_bytes: int) -> int:
    """Room that the aligned superset of a range needs."""
    return align_up(offset + num_bytes) - align_down(offset)


class Reader:
    """Reader threads over the shards of one checkpoint."""

    def __init__(
        self,
        files: WeightFiles,
        *,
        counters: Counters,
        trace: Trace,
        depth: int = DEPTH,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        """`depth` reads of at most `piece_bytes` (a multiple of the page) are in flight at once."""
        assert piece_bytes % PAGE == 0, "a piece begins and ends on page borders"
        self.files = files
        self._piece_bytes = piece_bytes
        self._num_active, self._active_since = 0, 0.0
        # Read-ahead in flight, and whether someone waits for some.
        self._num_ahead, self._is_starved = 0, False
        self._counters, self._trace = counters, trace
        self._ahead: deque[Piece] = deque()
        self._demand: deque[Piece] = deque()
        self._guesses: deque[Piece] = deque()
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._done = threading.Condition(self._lock)
        self._closed = False
        self._threads = [threading.Thread(target=self._serve, daemon=True) for _ in range(depth)]
        for thread in self._threads:
            thread.start()

    def submit(self, read: Read, *, demand: bool, guess: bool = False) -> None:
        """Queues a read; demand reads go before all read-ahead, and that goes before guesses."""
        self.submit_all([read], demand=demand, guess=guess)

    def submit_all(self, reads: list[Read], *, demand: bool, guess: bool = False) -> None:
        """Queues reads in their order."""
        pieces: list[Piece] = []
        for read in reads:
            size = len(read.buffer)
            # What is checked is checked whole, so it is read as one.
            piece = self._piece_bytes if read.check is None else size
            of_read = [(read, at, min(piece, size - at)) for at in range(0, size, piece)]
            read.pending = len(of_read)
            self._count(read, size, len(of_read))
            pieces += of_read
        with self._lock:
            (self._guesses if guess else self._demand if demand else self._ahead).extend(pieces)
            self._work.notify(len(pieces))

    def wait(self, read: Read) -> None:
        """Returns when every byte is there. Raises ReadError, or what else a reader thread met."""
        if read.pending:
            began = time.perf_counter()
            with self._lock:
                read.awaited = True
                if read.kind == "trunk":
                    self._is_starved = True
                    self._work.notify_all()
                while read.pending and not self._closed:
                    self._done.wait()
                self._is_starved = False
                if read.pending:
                    raise self._failed(read, 0, len(read.buffer), "the reader was closed")
            wait_s = time.perf_counter() - began
            self._counters.wait_s += wait_s
            self._counters.num_waits += 1
            if read.kind == "experts":
                self._counters.expert_waits += 1
                self._counters.expert_wait_s += wait_s
            if self._trace.on:
                self._trace.event("wait", kind=read.kind, wait_s=round(wait_s, 6))
        if read.error is not None:
            raise read.error

    def hurry(self, read: Read) -> None:
        """A guess came true before it was read: what no thread has begun of it is a demand now."""
        with self._lock:
            self._demand.extend(piece for piece in self._guesses if piece[0] is read)
            self._drop_guess(read)

    def withdraw(self, read: Read) -> int:
        """A guess was wrong: gives the bytes of it that no thread has begun, and that won't be read."""
        with self._lock:
            dropped = self._drop_guess(read)
            read.pending -= len(dropped)
        num_bytes = sum(dropped)
        self._counters.num_reads -= len(dropped)
        self._counters.bytes_experts -= num_bytes
        return num_bytes

    def close(self) -> None:
        """Ends the threads; queued reads that no thread has begun are dropped."""
        with self._lock:
            self._closed = True
            self._ahead.clear()
            self._demand.clear()
            self._guesses.clear()
            self._work.notify_all()
            self._done.notify_all()
        for thread in self._threads:
            thread.join()
        self.files.close()

    def _count(self, read: Read, size: int, num_pieces: int) -> None:
        counters = self._counters
        counters.num_reads += num_pieces
        match read.kind:
            case "trunk":
                counters.bytes_trunk += size
            case "experts":
                counters.bytes_experts += size
            case "embedding":
                counters.bytes_embedding += size
        if self._trace.on:
            name = self.files.paths[read.path_id].name
            self._trace.event("read", kind=read.kind, file=name, offset=read.offset, bytes=size)

    def _serve(self) -> None:
        while True:
            with self._lock:
                while not (queue := self._queue()) and not self._closed:
                    self._work.wait()
                if self._closed:
                    return
                is_ahead = queue is self._ahead
                run = self._next_run(queue)
                self._begin_active(is_ahead)
            errors: list[BaseException | None]
            try:
                errors = self._fill_run(run)
            except BaseException as failure:
                # No memory, say. Whoever waits gets it; a thread that just ended would let them wait on.
                errors = [failure] * len(run)
            with self._lock:
                # The time of reading is whole when the last piece is there; a check is no part of it.
                self._end_active(is_ahead)
                for (read, _, _), error in zip(run, errors, strict=True):
                    if read.check is None:
                        self._finish(read, error)
            for (read, _, _), error in zip(run, errors, strict=True):
                if read.check is not None:
                    fault = error or _fault(read, read.check)
                    with self._lock:
                        self._finish(read, fault)

    def _queue(self) -> deque[Piece]:
        """The lock is held: what the next piece is taken from; empty where nothing is to be begun.

        Read-ahead of the trunk takes half of the threads, and all while it is waited for: a demand waits
        behind what is in flight, the less, the sooner it comes, and half keep a disk busy. Guesses are small.
        """
        if self._demand:
            return self._demand
        if self._ahead and (self._is_starved or self._num_ahead < (len(self._threads) + 1) // 2):
            return self._ahead
        return self._guesses

    def _next_run(self, queue: deque[Piece]) -> list[Piece]:
        """The lock is held: the next piece of a queue, and those that go on where it ends, up to a whole one.

        Small reads side by side are slower than one of their size; but no thread may be left without work.
        """
        run = [queue.popleft()]
        total = run[0][2]
        while len(queue) >= len(self._threads) and total + queue[0][2] <= self._piece_bytes:
            read, at, size = run[-1]
            after, after_at, after_size = queue[0]
            if after.path_id != read.path_id or after.offset + after_at != read.offset + at + size:
                break
            run.append(queue.popleft())
            total += after_size
        return run

    def _fill_run(self, run: list[Piece]) -> list[BaseException | None]:
        """Reads every piece; what one call for all leaves short is read by itself."""
        came = 0
        if len(run) > 1:
            first, first_at, _ = run[0]
            buffers = [read.buffer[at : at + size] for read, at, size in run]
            with contextlib.suppress(OSError):  # it comes again below, and is named there
                came = self.files.read_run_at(first.path_id, buffers, first.offset + first_at)
        errors: list[BaseException | None] = []
        for read, at, size in run:
            errors.append(None if came >= size else self._fill(read, at, size))
            came = max(came - size, 0)
        return errors

    def _drop_guess(self, read: Read) -> list[int]:
        """The lock is held: takes the pieces of a read out of the guesses; gives their sizes."""
        dropped = [size for found, _, size in self._guesses if found is read]
        self._guesses = deque(piece for piece in self._guesses if piece[0] is not read)
        return dropped

    def _finish(self, read: Read, error: BaseException | None) -> None:
        """The lock is held; `wait` may look without it, and must never take failed bytes for good ones."""
        read.error = read.error or error
        read.pending -= 1
        # Nobody is woken for what nobody waits for: waking costs more than a small read.
        if not read.pending and read.awaited:
            self._done.notify_all()

    def _begin_active(self, is_ahead: bool) -> None:
        """The lock is held: counts the time in which at least one read is in flight."""
        self._num_ahead += is_ahead
        if not self._num_active:
            self._active_since = time.perf_counter()
        self._num_active += 1

    def _end_active(self, is_ahead: bool) -> None:
        if is_ahead:
            self._num_ahead -= 1
            if self._demand:  # that is what this thread goes on with; another may read ahead
                self._work.notify()
        self._num_active -= 1
        if not self._num_active:
            self._counters.reading_s += time.perf_counter() - self._active_since

    def _fill(self, read: Read, at: int, size: int) -> ReadError | None:
        """Reads one piece; the end of the file may cut the aligned tail, never the bytes asked for."""
        needed = min(at + size, read.needed)
        got = at
        while got < needed:
            # A retry after a short read must start on a page border again.
            start = max(align_down(got), at)
            try:
                count = self.files.read_at(read.path_id, read.buffer[start : at + size], read.offset + start)
            except OSError as error:
                return self._failed(read, at, size, str(error.strerror or error))
            if start + count <= got:
                return self._failed(read, at, size, f"only {got - at:,} bytes came")
            got = start + count
        return None

    def _failed(self, read: Read, at: int, size: int, reason: str) -> ReadError:
        path = self.files.paths[read.path_id]
        return ReadError(
            f"reading {path.name} failed: {reason}.",
            evidence=[
                ("file", str(path)),
                ("range", f"bytes {read.offset + at:,} to {read.offset + at + size:,}"),
            ],
            remedies=[
                "No text came from the missing bytes. Check the disk (dmesg, smartctl) and the file:",
                "  twoends inspect MODEL",
            ],
        )


def _fault(read: Read, check: Check) -> BaseException | None:
    """What is wrong with bytes that were read, or what kept them from being looked at."""
    try:
        return check(read.buffer[read.head : read.needed])
    except BaseException as failure:
        return failure
