"""`twoends bench predict MODEL`: seconds a token on every rung, said before the ladder is run, then the run.

From `doctor` come the disk's rate and the arithmetic's; from one run its routing, which is the same at every
budget, so that the engine's policy can be asked for its hits; from a prompt at each budget the plan. No time
of a run enters a prediction.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twoends.bench.ladder import Job, RungRow, climb
from twoends.bench.machine import machine
from twoends.bench.replay import engine_passes
from twoends.bench.report import Spread
from twoends.bench.traces import RoutingTrace, read_trace
from twoends.checkpoint.pack_file import is_pack
from twoends.cli.bench_ladder import choose_cap, job_of, size_text
from twoends.cli.command import Values
from twoends.cli.screen import Screen, columns, facts, plural
from twoends.engine.budget import Plan, make_plan
from twoends.engine.device import DiskRate, rate_under
from twoends.engine.open import Checkpoint
from twoends.errors import DoesNotFit, TwoendsError
from twoends.kernels.choose import choose
from twoends.sizing.calibration import ComputeRate, kept_compute
from twoends.sizing.estimate import Estimate, estimate
from twoends.units import format_duration

# A prediction is good within this share of the run's median.
GOOD = 0.15
# Fields of a plan that --json gives in another form.
_ROWS = ("rows", "floor_rows")


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What `doctor` kept."""

    disk: DiskRate
    compute: ComputeRate


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One rung: the plan's estimate with the hits of each decoding pass. `token_s` is over those passes."""

    ram_bytes: int
    hit_share: float
    token_s: Spread
    middle: Estimate


def show_prediction(values: Values, screen: Screen) -> None:
    """Predicts, prints, runs, compares. Raises TwoendsError without doctor's figures."""
    job = job_of(values)
    figures = _figures(values, job)
    cap = choose_cap(values.cap)
    card = machine(directory=job.model)
    screen.live("  one run, for its routing")
    trace = _routing(job, max(values.rungs))
    screen.live("  one prompt on each rung, for its plan")
    made = [p for ram in values.rungs if (p := predict(job, ram, figures=figures, trace=trace)) is not None]
    screen.clear_live()
    if not values.json:
        for line in [*facts(card.rows()), "", *_prediction_lines(made), "", "  now the runs"]:
            screen.line(line)
    rows = climb(job, [p.ram_bytes for p in made], cap=cap, repeat=values.repeat, row_done=lambda row: None)
    if values.json:
        screen.line(json.dumps(_object(card.as_json(), figures, made, rows)))
        return
    for line in ["", *_comparison(made, rows)]:
        screen.line(line)


def predict(job: Job, ram_bytes: int, *, figures: Figures, trace: RoutingTrace) -> Prediction | None:
    """The estimate of every decoding pass of one rung; None below the floor."""
    checkpoint = Checkpoint.open(job.model)
    plan = _plan_of_a_run(checkpoint, job, ram_bytes)
    if plan is None:
        return None
    passes = engine_passes(trace, plan.num_slots)[_prompt_passes(plan, job) :]
    if plan.fills_slots:  # read before they are asked for, whatever a replay of demands says
        passes = [(requests, requests) for requests, _ in passes]
    found = [
        estimate(
            plan,
            checkpoint.config,
            disk=figures.disk,
            compute=figures.compute,
            hit_share=hits / requests,
            is_packed=is_pack(job.model),
        )
        for requests, hits in passes
    ]
    seconds = [one.seconds for one in found if one.seconds is not None]
    return Prediction(
        ram_bytes=ram_bytes,
        hit_share=sum(hits for _, hits in passes) / sum(requests for requests, _ in passes),
        token_s=Spread.of(seconds),
        middle=sorted(found, key=lambda one: one.seconds or 0.0)[len(found) // 2],
    )


def errors_of(made: Sequence[Prediction], rows: Sequence[RungRow]) -> dict[int, float]:
    """Budget -> share by which the prediction's median is above the run's (below: negative)."""
    found = {}
    for prediction in made:
        row = next((row for row in rows if row.ram_bytes == prediction.ram_bytes), None)
        if row is not None and row.token_s is not None:
            found[prediction.ram_bytes] = prediction.token_s.median / row.token_s.median - 1
    return found


def _figures(values: Values, job: Job) -> Figures:
    choice = choose(threads=values.threads, isa=os.environ.get("TWOENDS_ISA"), kernels="native")
    disk = rate_under(job.model)
    compute = kept_compute(job.model, isa=choice.isa, threads=choice.threads)
    if disk is None or compute is None:
        what = "the disk" if disk is None else f"the arithmetic on {plural(choice.threads, 'thread')}"
        raise TwoendsError(
            f"a prediction needs doctor's figures of {what}.",
            remedies=[f"Measure them:  twoends doctor --disk {job.model} --threads {choice.threads}"],
        )
    return Figures(disk=disk, compute=compute)


def _plan_of_a_run(checkpoint: Checkpoint, job: Job, ram_bytes: int) -> Plan | None:
    """The plan of a run, told by one that ends after the prompt: its process holds more than this one."""
    short = dataclasses.replace(job, num_new=1)
    context = len(job.ids) + job.num_new
    done = subprocess.run(
        [*short.words(ram_bytes), "--context", str(context)], capture_output=True, text=True, check=False
    )
    if done.returncode == DoesNotFit.exit_code:
        return None
    if done.returncode:
        raise TwoendsError("the run for its plan failed.", evidence=[("says", done.stderr.strip())])
    found = json.loads(done.stdout)["plan"]
    # What this process holds is no part of it; every size is replaced.
    form = make_plan(
        checkpoint.config,
        checkpoint.index,
        ram_bytes=ram_bytes,
        program_bytes=0,
        context_tokens=context,
        chunk_tokens=None,
    )
    sizes = {field.name: found[field.name] for field in dataclasses.fields(Plan) if field.name not in _ROWS}
    return dataclasses.replace(form, **sizes)


def _routing(job: Job, ram_bytes: int) -> RoutingTrace:
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "trace.jsonl"
        done = subprocess.run(
            [*job.words(ram_bytes), "--trace", str(path)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise TwoendsError("the run for its routing failed.", evidence=[("says", done.stderr.strip())])
        return read_trace(path)


def _prompt_passes(plan: Plan, job: Job) -> int:
    return -(-len(job.ids) // plan.chunk_tokens)


def _prediction_lines(made: Sequence[Prediction]) -> list[str]:
    heads = ["budget", "predicted", "hits", "reading", "arithmetic", "asked for", "decides"]
    rows = [heads]
    for one in made:
        middle = one.middle
        rows.append(
            [
                size_text(one.ram_bytes),
                format_duration(one.token_s.median),
                f"{100 * one.hit_share:.0f} %",
                format_duration(middle.reading_s or 0.0),
                format_duration(middle.arithmetic_s or 0.0),
                format_duration(middle.demanded_s),
                middle.wall or "",
            ]
        )
    return columns(rows, right=range(6))


def _comparison(made: Sequence[Prediction], rows: Sequence[RungRow]) -> list[str]:
    errors = errors_of(made, rows)
    table = [["budget", "predicted", "measured", "range", "error"]]
    for one in made:
        row = next(row for row in rows if row.ram_bytes == one.ram_bytes)
        if row.token_s is None:
            table.append([size_text(one.ram_bytes), format_duration(one.token_s.median), row.trouble or "-"])
            continue
        low, high = format_duration(row.token_s.low), format_duration(row.token_s.high)
        error = f"{100 * errors[one.ram_bytes]:+.0f} %"
        measured = format_duration(row.token_s.median)
        table.append(
            [
                size_text(one.ram_bytes),
                format_duration(one.token_s.median),
                measured,
                f"{low} to {high}",
                error,
            ]
        )
    good = sum(abs(error) <= GOOD for error in errors.values())
    verdict = f"  {good} of {plural(len(made), 'rung')} within {100 * GOOD:.0f} % of the run's median"
    return [*columns(table, right=range(5)), "", verdict]


def _object(
    card: dict[str, Any], figures: Figures, made: Sequence[Prediction], rows: Sequence[RungRow]
) -> dict[str, Any]:
    """Everything that was said before the runs, and the runs."""
    return {
        "machine": card,
        "disk": figures.disk.as_object(),
        "compute": figures.compute.as_object(),
        "predictions": [dataclasses.asdict(one) for one in made],
        "rows": [dataclasses.asdict(row) for row in rows],
        "errors": {str(ram): error for ram, error in errors_of(made, rows).items()},
    }
