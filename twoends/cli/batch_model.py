"""The work of `twoends batch`, in order: read the input, see what is missing, plan, answer, report."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

from twoends.checkpoint.shipped import shipped_model
from twoends.cli import load
from twoends.cli.batch_report import BatchLive, BatchReport, batch_object, draw_card
from twoends.cli.command import Values
from twoends.cli.narrate import say_what_runs
from twoends.cli.run_model import open_trace, stand_in_tokenizer
from twoends.cli.screen import Screen, plural
from twoends.cli.stop import StopSignals
from twoends.engine.budget import Plan
from twoends.engine.device import shape_under
from twoends.engine.memory import peak_resident_bytes
from twoends.engine.open import Checkpoint, OpenModel
from twoends.engine.sequences import best_plan
from twoends.errors import NotSound, TwoendsError
from twoends.generate.batch import Batch, Requests, Tally
from twoends.generate.batch_input import BatchInput
from twoends.generate.batch_results import BatchResults
from twoends.generate.completion import Completion
from twoends.generate.stream import TextStream
from twoends.generate.tokenizer import Tokenizer
from twoends.kernels.choose import Choice
from twoends.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A batch whose input is whole and whose output can be continued; no weight was read yet."""

    values: Values
    checkpoint: Checkpoint
    tokenizer: Tokenizer | None
    choice: Choice
    source: BatchInput
    results: BatchResults
    requests: Requests


def batch(values: Values, screen: Screen) -> None:
    """`twoends batch`. Raises what the card can't say: the errors of errors.py."""
    began = time.perf_counter()
    source = BatchInput(Path(values.input))
    directory = shipped_model() if values.model is None else Path(values.model)
    checkpoint = Checkpoint.open(
        directory,
        latent_eps=values.latent_eps,
        expert_activations=values.expert_activations,
        source=values.source,
    )
    tokenizer = load.open_tokenizer(checkpoint, needed=False)
    choice = load.choose_kernels(values)
    output = Path(values.output)
    with BatchResults(output, source, fingerprint=checkpoint.index.fingerprint) as results:
        if not results.missing():
            _say_done_before(values, screen, source, output)
            return
        job = Job(
            values=values,
            checkpoint=checkpoint,
            tokenizer=tokenizer,
            choice=choice,
            source=source,
            results=results,
            requests=Requests(tokenizer, vocab_size=checkpoint.config.vocab_size, room=values.context),
        )
        model = _open_model(job)
        try:
            tally = _answer(job, model, screen)
        finally:
            model.close()
    report = BatchReport(
        model=model,
        source=source,
        output=output,
        num_kept=results.num_kept,
        tally=tally,
        choice=choice,
        policy=values.policy,
        peak_bytes=peak_resident_bytes(),
        wall_s=time.perf_counter() - began,
    )
    if values.json:
        screen.line(json.dumps(batch_object(report)))
    else:
        draw_card(report, screen)
    _raise_what_went_wrong(report)


def _plan(job: Job) -> Plan:
    """The plan with the fewest bytes per token, with as many sequences and rows as the user says, if so."""
    values = job.values
    demand = job.requests.measure(job.source.lines(iter(job.results.missing())))
    ram_bytes = load.budget_bytes(values)

    def plan_for(count: int, chunk: int) -> Plan:
        return job.checkpoint.plan(
            ram_bytes=ram_bytes,
            context_tokens=values.context or demand.largest,
            chunk_tokens=values.chunk or chunk,
            num_sequences=count,
            reference=job.choice.ops.backend == "reference",
        )

    most = max(demand.num_requests, 1)
    return best_plan(plan_for, most=most, load=demand.load, exactly=values.sequences)


def _open_model(job: Job) -> OpenModel:
    return OpenModel(
        job.checkpoint,
        _plan(job),
        job.choice.ops,
        policy=job.values.policy,
        trace=open_trace(job.values.trace),
        direct=not job.values.no_direct,
        read_shape=shape_under(job.checkpoint.directory),
    )


def _answer(job: Job, model: OpenModel, screen: Screen) -> Tally:
    say_what_runs(job.checkpoint, model.plan, job.choice, model.files, values=job.values, screen=screen)
    if job.tokenizer is None:
        eos_id = model.config.eos_id
        tokenizer, stop_ids = stand_in_tokenizer(), frozenset(() if eos_id is None else (eos_id,))
    else:
        tokenizer, stop_ids = job.tokenizer, frozenset(job.tokenizer.stop_ids)

    def new_stream(completion: Completion) -> TextStream:
        return TextStream(tokenizer, stop_strings=completion.stop, stop_ids=stop_ids)

    work = Batch(model, job.source, job.results, job.requests, new_stream=new_stream)
    live = BatchLive(screen, model, num_requests=len(job.source), num_kept=job.results.num_kept)
    with StopSignals(screen, then="stopping") as stop:
        try:
            return work.run(live, lambda: stop.asked)
        except KeyboardInterrupt:
            raise _stopped(job.results) from None


def _say_done_before(values: Values, screen: Screen, source: BatchInput, output: Path) -> None:
    if values.json:
        counts = {"num_requests": len(source), "num_kept": len(source)}
        none = {"num_answered": 0, "num_refused": 0, "num_left": 0}
        screen.line(json.dumps({"output": str(output), **counts, **none}))
    else:
        screen.note(f"  all of {plural(len(source), 'request')} are answered in {output} already")


def _raise_what_went_wrong(report: BatchReport) -> None:
    plan = report.model.plan
    if report.peak_bytes > plan.ram_bytes:
        raise NotSound(
            f"this batch took {format_bytes(report.peak_bytes)}; --ram promised "
            f"{format_bytes(plan.ram_bytes)} at most. This is a defect in twoends.",
            evidence=[("planned", format_bytes(plan.total_bytes))],
            remedies=["The answers are right. Report this with the output of:  twoends batch ... --json"],
        )
    if not report.tally.is_whole:
        raise TwoendsError(
            f"stopped with {report.num_left:,} of {plural(len(report.source), 'request')} left.",
            remedies=["The answers so far are kept. The same command does the rest."],
        )


def _stopped(results: BatchResults) -> TwoendsError:
    return TwoendsError(
        f"stopped at once, with {plural(len(results.missing()), 'request')} left.",
        remedies=["The answers so far are kept. The same command does the rest."],
    )
