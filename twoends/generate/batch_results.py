"""The output of a batch: one line an answer, appended whole; the same file is continued or refused.

A line is written with one call and then synced. A kill can leave a part of the last line at most,
which has no line end and is cut off by the next run. Each line's `id` says which input and which
model it is an answer of, so that no answer of another batch is taken for one of this.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from twoends.errors import DoesNotFit, OptionError, TwoendsError
from twoends.generate.batch_input import BatchInput

_ID_DIGITS = 12


class BatchResults:
    """The answers that are there, and room for more. `num_kept` were there at open."""

    def __init__(self, path: Path, source: BatchInput, *, fingerprint: str) -> None:
        """Opens or makes the file. Raises OptionError for one that isn't of this input and model."""
        self.path = path
        self._source = source
        self._parts = (_short(f"model {fingerprint}"), _short(f"input {source.digest}"))
        self._is_done = bytearray(len(source))
        self._refuse_the_input()
        self._is_new = not path.exists()
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            raise OptionError(f"{path} can't be written: {error.strerror}.") from error
        try:
            self._lock()
            self._size = self._read_back()
            os.ftruncate(self._fd, self._size)
        except BaseException:
            os.close(self._fd)
            raise
        self.num_kept = sum(self._is_done)

    def __enter__(self) -> BatchResults:
        return self

    def __exit__(self, *exc: object) -> None:
        """Closes the file; one that was made for nothing goes."""
        if self._is_new and not self._size:
            self.path.unlink(missing_ok=True)
        os.close(self._fd)

    def missing(self) -> list[int]:
        """The requests that have no answer yet, in the order of the input."""
        return [index for index, done in enumerate(self._is_done) if not done]

    def name(self, custom_id: str) -> str:
        """What an answer is called: model, input and request, twelve digits each."""
        return "".join((*self._parts, _short(f"request {custom_id}")))

    def append(self, custom_id: str, response: dict[str, Any], error: dict[str, Any] | None) -> None:
        """Adds an answer, on the disk when this returns. Raises DoesNotFit when the disk is full."""
        index = self._source.index_of(custom_id)
        assert index is not None, "the answer is to a request of this input"
        assert not self._is_done[index], "a request has one answer"
        line = {"id": f"batch_req_{self.name(custom_id)}", "custom_id": custom_id}
        data = (json.dumps({**line, "response": response, "error": error}) + "\n").encode("ascii")
        try:
            written = os.write(self._fd, data)
            if written < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fdatasync(self._fd)
        except OSError as trouble:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._size)
            raise self._failed(trouble) from trouble
        self._size += len(data)
        self._is_done[index] = True

    def _refuse_the_input(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            if self.path.samefile(self._source.path):
                raise OptionError(f"{self.path} is the input; the answers need a file of their own.")

    def _lock(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OptionError(f"another process is writing {self.path}.") from None

    def _read_back(self) -> int:
        """Marks what is there as done; gives the bytes of all whole lines."""
        size = 0
        with open(self._fd, "rb", closefd=False) as file:
            for number, raw in enumerate(file, 1):
                if not raw.endswith(b"\n"):
                    break
                self._mark(number, raw)
                size += len(raw)
        return size

    def _mark(self, number: int, raw: bytes) -> None:
        try:
            found = json.loads(raw)
            custom_id, name = found["custom_id"], found["id"].removeprefix("batch_req_")
            parts = (name[:_ID_DIGITS], name[_ID_DIGITS : 2 * _ID_DIGITS])
        except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
            raise self._refused(f"line {number} is no answer of a batch", []) from None
        names = ("model", "input")
        other = [names[i] for i in range(2) if parts[i] != self._parts[i]]
        if other:
            rows = [("line", str(number)), ("custom_id", str(custom_id)), ("differs", " and ".join(other))]
            raise self._refused(f"it holds answers of another {' and '.join(other)}", rows)
        index = self._source.index_of(custom_id)
        if index is None or name != self.name(custom_id):
            raise self._refused(f"line {number} answers no request of the input", [])
        if self._is_done[index]:
            raise self._refused(f"line {number} answers {custom_id!r} a second time", [])
        self._is_done[index] = True

    def _refused(self, reason: str, evidence: list[tuple[str, str]]) -> OptionError:
        return OptionError(
            f"{self.path} can't be continued: {reason}.",
            evidence=evidence,
            remedies=[
                "It was left as it is. Choose another output, or take the input and the model that it was "
                "begun with."
            ],
        )

    def _failed(self, error: OSError) -> TwoendsError:
        kind = DoesNotFit if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else TwoendsError
        return kind(
            f"an answer can't be written to {self.path}: {error.strerror}.",
            remedies=["The answers before it are whole. Make room and run the same command again."],
        )


def _short(text: str) -> str:
    data = text.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(data, digest_size=_ID_DIGITS // 2).hexdigest()
