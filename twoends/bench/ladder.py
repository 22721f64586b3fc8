"""The memory ladder: one model at several budgets that the system enforces, run after run; same ids or not.

Every run is a process of its own, begun with the model's files out of the page cache. The first run
that succeeds gives the ids that all others must give.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twoends.bench.limits import Cap, Ended, run_capped
from twoends.bench.machine import Machine
from twoends.bench.page_cache import evict
from twoends.bench.report import Spread
from twoends.errors import DoesNotFit
from twoends.units import format_bytes

# The program's own share is measured anew in every process, so a plan's floor is good to a few percent.
_CLEARLY_BELOW = 0.9

Launch = Callable[[Sequence[str], int], Ended]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is run on every rung."""

    model: Path
    ids: tuple[int, ...]
    num_new: int
    threads: int | None

    def floor_words(self, ram_bytes: int) -> list[str]:
        """The command that says what the least budget is; it reads no weight."""
        words = [sys.executable, "-m", "twoends", "plan", str(self.model), "--json"]
        return [*words, "--context", str(len(self.ids) + self.num_new), "--ram", str(ram_bytes)]

    def words(self, ram_bytes: int) -> list[str]:
        """The command of one run."""
        words = [sys.executable, "-m", "twoends", "run", str(self.model), "--json"]
        words += ["--ids", ",".join(map(str, self.ids)), "-n", str(self.num_new), "--ram", str(ram_bytes)]
        return words if self.threads is None else [*words, "--threads", str(self.threads)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RungRow:
    """One budget. `trouble` says why there are no figures; `differs_at` is the first token that differs.

    Times are seconds per decoded token over all tokens of all runs, the prompt's passes left out; bytes
    per pass, hits and digests are of the last run, the peak is the highest. `group_peak_bytes` is the
    cgroup's count, page cache included.
    """

    ram_bytes: int
    trouble: str | None
    is_below_floor: bool = False
    was_killed: bool = False
    runs: int = 0
    window_bytes: int = 0
    pinned_bytes: int = 0
    slots: int = 0
    token_s: Spread | None = None
    read_bytes_per_pass: float = 0.0
    hit_share: float | None = None
    peak_bytes: int = 0
    group_peak_bytes: int | None = None
    ids_digest: str = ""
    logits_digest: str = ""
    differs_at: int | None = None
    logits_differ: bool = False
    cached_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LadderReport:
    """All rungs on one machine."""

    machine: Machine
    cap: Cap
    job: Job
    repeat: int
    rows: tuple[RungRow, ...]

    @property
    def done(self) -> tuple[RungRow, ...]:
        """The rungs that gave ids."""
        return tuple(row for row in self.rows if row.trouble is None)

    @property
    def num_different(self) -> int:
        """Rungs on which a run gave other ids, or other bits of the logits."""
        return sum(row.differs_at is not None or row.logits_differ for row in self.rows)

    def as_json(self) -> dict[str, Any]:
        """The fields by name; sizes in bytes, times in seconds."""
        found = dataclasses.asdict(self)
        found["job"]["model"] = str(self.job.model)
        found["job"]["ids"] = list(self.job.ids)
        return {
            **found,
            "rungs_different": self.num_different,
        }


def climb(
    job: Job,
    rungs: Sequence[int],
    *,
    cap: Cap,
    repeat: int,
    row_done: Callable[[RungRow], None],
    launch: Launch | None = None,
) -> tuple[RungRow, ...]:
    """Every rung, smallest first. `launch` runs one command within a number of bytes (for tests).

    A rung clearly below the floor is not run: its limit would end the process before it could refuse.
    """
    if launch is None:

        def launch(words: Sequence[str], limit_bytes: int) -> Ended:
            return run_capped(words, cap=cap, limit_bytes=limit_bytes)

    floor = _floor_bytes(job, max(rungs), launch)
    rows: list[RungRow] = []
    expected: dict[str, Any] | None = None
    for ram_bytes in sorted(rungs):
        if ram_bytes < _CLEARLY_BELOW * floor:
            rows.append(_below(ram_bytes, floor))
            row_done(rows[-1])
            continue
        runs: list[dict[str, Any]] = []
        ended, cached = None, 0
        for _ in range(repeat):
            cached = max(cached, evict(_files(job.model)))
            ended = launch(job.words(ram_bytes), ram_bytes)
            if ended.code:
                break
            runs.append(json.loads(ended.stdout))
        assert ended is not None, "a rung is run at least once"
        if ended.code:
            rows.append(_failed(ram_bytes, ended, len(runs)))
        else:
            expected = expected or runs[0]
            rows.append(_row(ram_bytes, runs, expected, ended, cached))
        row_done(rows[-1])
    return tuple(rows)


def _floor_bytes(job: Job, most_bytes: int, launch: Launch) -> int:
    """The floor by a plan under the largest rung; 0 where that is refused as well: the runs will say why."""
    ended = launch(job.floor_words(most_bytes), most_bytes)
    return 0 if ended.code else int(json.loads(ended.stdout)["floor_bytes"])


def _below(ram_bytes: int, floor: int) -> RungRow:
    said = f"this model needs at least {format_bytes(floor)} to run"
    return RungRow(ram_bytes=ram_bytes, trouble=said, is_below_floor=True)


def _files(model: Path) -> list[Path]:
    return sorted(path for path in model.iterdir() if path.is_file())


def _failed(ram_bytes: int, ended: Ended, num_runs: int) -> RungRow:
    """What a run said, in its first line; a run that was killed says nothing."""
    is_below = ended.code == DoesNotFit.exit_code
    lines = [line for line in ended.stderr.splitlines() if line.strip()]
    said = lines[0].removeprefix("twoends: ") if lines else ""
    if ended.was_killed:
        said = f"killed by signal {-ended.code}"
    return RungRow(
        ram_bytes=ram_bytes,
        trouble=said or f"exit {ended.code}",
        is_below_floor=is_below,
        was_killed=ended.was_killed,
        runs=num_runs,
        group_peak_bytes=ended.peak_bytes,
    )


def _row(
    ram_bytes: int, runs: list[dict[str, Any]], expected: dict[str, Any], ended: Ended, cached: int
) -> RungRow:
    last = runs[-1]
    plan = last["plan"]
    num_passes = len(last["token_s"]) - (-len(last["prompt_ids"]) // plan["chunk_tokens"])
    times = [seconds for run in runs for seconds in run["token_s"]]
    asked = last["expert_requests"]
    different = [at for run in runs if (at := _first_difference(run["ids"], expected["ids"])) is not None]
    return RungRow(
        ram_bytes=ram_bytes,
        trouble=None,
        runs=len(runs),
        window_bytes=plan["window_bytes"],
        pinned_bytes=plan["pinned_bytes"],
        slots=plan["num_slots"],
        token_s=Spread.of(times) if times else None,
        read_bytes_per_pass=last["bytes_read"] / num_passes,
        hit_share=last["expert_hits"] / asked if asked else None,
        peak_bytes=max(run["peak_rss_bytes"] for run in runs),
        group_peak_bytes=ended.peak_bytes,
        ids_digest=last["ids_digest"],
        logits_digest=last["logits_digest"],
        differs_at=min(different) if different else None,
        logits_differ=any(run["logits_digest"] != expected["logits_digest"] for run in runs),
        cached_bytes=cached,
    )


def _first_difference(found: list[int], expected: list[int]) -> int | None:
    """Index of the first token that is not the same; None where all are."""
    for at, (one, other) in enumerate(zip(found, expected, strict=False)):
        if one != other:
            return at
    return None if len(found) == len(expected) else min(len(found), len(expected))
