"""The ladder's books: rungs in order, differences found, failures told apart. The runs are made up here."""

from __future__ import annotations

import json

import pytest

from twoends.bench.ladder import Job, climb
from twoends.bench.limits import Ended

IDS = [5, 6, 7, 8]


@pytest.fixture
def job(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    return Job(model=tmp_path, ids=(1, 2, 3), num_new=4, threads=None)


def run_object(*, ids=IDS, logits="l" * 8, token_s=(0.1, 0.2, 0.3), bytes_read=500):
    return {
        "ids": ids,
        "prompt_ids": [1, 2, 3],
        "ids_digest": f"b2:{sum(ids)}",
        "logits_digest": logits,
        "token_s": list(token_s),
        "bytes_read": bytes_read,
        "expert_requests": 10,
        "expert_hits": 4,
        "peak_rss_bytes": 77,
        "plan": {"window_bytes": 9, "pinned_bytes": 3, "num_slots": 12, "chunk_tokens": 2},
    }


def ended(code=0, *, stdout="", stderr="", peak=88):
    return Ended(code=code, stdout=stdout, stderr=stderr, peak_bytes=peak, hits=0)


class Runs:
    """Gives one end after another, and remembers the commands."""

    def __init__(self, *ends: Ended, floor: int = 20) -> None:
        self._ends, self._floor = list(ends), floor
        self.asked: list[tuple[list[str], int]] = []

    def __call__(self, words, limit_bytes):
        if "plan" in words:
            return ended(stdout=json.dumps({"floor_bytes": self._floor}))
        self.asked.append((list(words), limit_bytes))
        return self._ends.pop(0)


def fine(**fields):
    return ended(stdout=json.dumps(run_object(**fields)))


def go(job, runs, rungs=(200, 100), repeat=1):
    rows = []
    assert climb(job, rungs, cap="none", repeat=repeat, row_done=rows.append, launch=runs) == tuple(rows)
    return rows


def test_rungs_go_up_and_each_run_gets_its_budget_as_ram_and_as_limit(job):
    runs = Runs(*[fine() for _ in range(4)])
    rows = go(job, runs, repeat=2)
    assert [row.ram_bytes for row in rows] == [100, 200]
    assert [limit for _, limit in runs.asked] == [100, 100, 200, 200]
    assert all(words[words.index("--ram") + 1] == str(limit) for words, limit in runs.asked)
    words = runs.asked[0][0]
    assert words[words.index("--ids") + 1] == "1,2,3"


def test_a_row_has_the_spread_of_all_tokens_of_all_runs(job):
    rows = go(job, Runs(fine(token_s=[1, 2]), fine(token_s=[3, 9]), fine(), fine()), repeat=2)
    spread = rows[0].token_s
    assert (spread.median, spread.low, spread.high, spread.repeats) == (2.5, 1, 9, 4)


def test_bytes_are_per_pass_over_the_weights(job):
    """Three prompt tokens in chunks of two are two passes, then one for each further token."""
    assert go(job, Runs(fine(), fine()))[0].read_bytes_per_pass == 500 / (2 + 3)


def test_other_ids_are_found_at_their_token_in_any_run(job):
    rows = go(job, Runs(fine(), fine(), fine(), fine(ids=[5, 6, 9, 8])), repeat=2)
    assert [row.differs_at for row in rows] == [None, 2]


def test_fewer_ids_differ_where_they_end(job):
    assert go(job, Runs(fine(), fine(ids=[5, 6, 7])))[1].differs_at == 3


def test_same_ids_from_other_logits_are_told(job):
    rows = go(job, Runs(fine(), fine(logits="m" * 8)))
    assert [(row.differs_at, row.logits_differ) for row in rows] == [(None, False), (None, True)]


def test_a_rung_below_the_floor_is_not_a_failure_of_the_others(job):
    below = ended(3, stderr="twoends: this model needs at least 150 B to run; the budget is 100 B.\n")
    rows = go(job, Runs(below, fine(), fine()), repeat=2)
    assert rows[0].is_below_floor
    assert rows[0].trouble == "this model needs at least 150 B to run; the budget is 100 B."
    assert (rows[0].runs, rows[1].runs, rows[1].trouble) == (0, 2, None)


def test_a_rung_clearly_below_the_floor_is_not_even_run(job):
    """Its limit would end the interpreter before it could say so."""
    runs = Runs(fine(), floor=150)
    rows = go(job, runs)
    assert [limit for _, limit in runs.asked] == [200]
    assert (rows[0].is_below_floor, rows[0].was_killed) == (True, False)
    assert rows[0].trouble == "this model needs at least 150 B to run"


def test_a_run_that_the_kernel_killed_is_told_from_one_that_failed(job):
    rows = go(job, Runs(ended(-9), ended(1, stderr="\ntwoends: reading model-1 failed: EIO.\n")))
    assert (rows[0].was_killed, rows[0].trouble) == (True, "killed by signal 9")
    assert (rows[1].was_killed, rows[1].is_below_floor) == (False, False)
    assert rows[1].trouble == "reading model-1 failed: EIO."
