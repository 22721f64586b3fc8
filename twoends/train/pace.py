"""How fast a run goes: the time of its last steps, without what is no step."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

# Steps that the shown speed is a mean of.
_STEPS = 20


class Pace:
    """Call `step_done` behind every step, and `go_on` when something else (a snapshot) came between two."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._steps_s: deque[float] = deque(maxlen=_STEPS)
        self._is_first = True
        self.go_on()

    def go_on(self) -> None:
        """The next step begins now."""
        self._before_s = self._clock()

    def step_done(self) -> float:
        """Seconds that a step takes of late.

        The first one compiles what the others run: it counts until there is a second.
        """
        now_s = self._clock()
        if len(self._steps_s) == 1 and self._is_first:
            self._steps_s.clear()
            self._is_first = False
        self._steps_s.append(now_s - self._before_s)
        self._before_s = now_s
        return sum(self._steps_s) / len(self._steps_s)
