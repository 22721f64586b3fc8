"""What the engine did: counters always, and one JSON line per event when a file is asked for.

Trace lines (docs/format.md): {"t_s", "event", ...} with events `model`, `pass`, `read`, `wait`, `route`,
`hit`, `miss`, `evict`, `guess`, `guessed`. Layers are 0-based, ids in rank order, sizes in bytes,
times in seconds since the trace began.
"""

from __future__ import annotations

import contextlib
import errno
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from twoends.errors import DoesNotFit, TwoendsError


@dataclass(slots=True, kw_only=True)
class Counters:
    """Sums over a run. Bytes are those asked of the device, alignment included."""

    bytes_trunk: int = 0
    bytes_experts: int = 0
    bytes_embedding: int = 0
    num_reads: int = 0
    expert_requests: int = 0
    expert_hits: int = 0
    # Guesses of the look-ahead: how many of a layer's choices it named, and what came of its reads.
    choices_guessed: int = 0
    choices_right: int = 0
    guesses_read: int = 0
    guesses_useful: int = 0
    guesses_late: int = 0
    guesses_wasted: int = 0
    guesses_withdrawn: int = 0
    bytes_wasted: int = 0
    num_waits: int = 0
    expert_waits: int = 0
    expert_wait_s: float = 0.0
    wait_s: float = 0.0
    # Time in which at least one read was in flight, whether or not anybody waited for it.
    reading_s: float = 0.0

    @property
    def bytes_read(self) -> int:
        """All bytes asked of the device."""
        return self.bytes_trunk + self.bytes_experts + self.bytes_embedding


class Trace:
    """Writes events to `path`; with None it costs one attribute test per event."""

    def __init__(self, path: Path | None = None) -> None:
        self._file: TextIO | None = None if path is None else path.open("w", encoding="ascii")
        self._began = time.perf_counter()

    @property
    def on(self) -> bool:
        """Whether events are written."""
        return self._file is not None

    def event(self, event: str, /, **fields: object) -> None:
        """One line; the caller tests `on` first where building the fields costs something."""
        if self._file is not None:
            t_s = round(time.perf_counter() - self._began, 6)
            try:
                self._file.write(json.dumps({"t_s": t_s, "event": event, **fields}) + "\n")
            except OSError as error:
                raise self._failed(error) from error

    def close(self) -> None:
        """Flushes and closes the file. Raises DoesNotFit when the disk is full."""
        if self._file is not None:
            try:
                self._file.flush()
            except OSError as error:
                raise self._failed(error) from error
            self._file.close()
            self._file = None

    def _failed(self, error: OSError) -> TwoendsError:
        """The trace ends here; what was written of it stays, whole lines but for the last."""
        assert self._file is not None
        name, file = self._file.name, self._file
        self._file = None
        with contextlib.suppress(OSError):
            file.close()
        kind = DoesNotFit if error.errno in (errno.ENOSPC, errno.EDQUOT) else TwoendsError
        return kind(
            f"the trace can't be written to {name}: {error.strerror}.",
            remedies=["Choose another --trace FILE, or leave it out."],
        )
