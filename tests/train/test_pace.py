"""The speed that a run shows."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from twoends.train.pace import Pace


def _pace(times_s: Iterable[float]) -> Pace:
    times = iter(times_s)
    return Pace(lambda: next(times))


def test_the_step_that_compiles_counts_until_there_is_another() -> None:
    pace = _pace([0, 60, 62, 65])
    assert [pace.step_done() for _ in range(3)] == [60, 2, 2.5]


def test_what_lies_between_two_steps_is_no_step() -> None:
    pace = _pace([0, 60, 62, 90, 94])
    pace.step_done(), pace.step_done()
    pace.go_on()
    assert pace.step_done() == 3


def test_old_steps_are_forgotten() -> None:
    pace = _pace(itertools.accumulate([0, 60, *[2] * 20, *[1] * 20]))
    assert [pace.step_done() for _ in range(41)][-1] == 1
