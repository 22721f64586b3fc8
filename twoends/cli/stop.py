"""Ctrl-C and SIGTERM during long work: the first asks to stop at a good place, the second stops now."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any

from twoends.cli.screen import Screen

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """Within the block, one signal sets `asked` and a second raises KeyboardInterrupt."""

    def __init__(self, screen: Screen, *, unit: str = "pass", then: str = "saving") -> None:
        """`unit` is what is finished before the stop, `then` what is done after it."""
        self._screen, self._unit, self._then = screen, unit, then
        self._before: dict[int, Any] = {}
        self.asked = False

    def __enter__(self) -> StopSignals:
        for number in _SIGNALS:
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        self._screen.alert_from_signal(
            f"twoends: {signal.Signals(number).name}: finishing this {self._unit}, then {self._then}; "
            "once more stops now."
        )
