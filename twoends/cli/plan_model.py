"""The work of `twoends plan`: the plan that `run` would make, the floor, and the rungs on either side."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twoends.checkpoint.config import read_config
from twoends.checkpoint.pack_file import is_pack
from twoends.checkpoint.predicted import predicted_index
from twoends.checkpoint.shipped import shipped_model
from twoends.cli import load
from twoends.cli.command import Values
from twoends.cli.narrate import model_line
from twoends.cli.report import plan_object
from twoends.cli.screen import COLUMNS, Screen, bar
from twoends.engine.budget import Plan, Row
from twoends.engine.device import DiskRate, rate_under
from twoends.engine.open import Checkpoint
from twoends.units import format_bytes, format_duration, format_rate

DEFAULT_CONTEXT = 4096
# Budgets that people have: powers of two and the half steps between them, 64 MB to 1.5 TB.
RUNGS = (
    *(mb * 10**6 for mb in (64, 96, 128, 192, 256, 384, 512, 768)),
    *(half_gb * 5 * 10**8 for k in range(1, 11) for half_gb in (2**k, 3 * 2 ** (k - 1))),
)
# Measured: the released tokenizer's 163,840 tokens take 47 MB.
_TOKENIZER_BYTES_PER_TOKEN = 290
_STREAMED = ("trunk window", "expert slots")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """What the screen shows and --json prints."""

    checkpoint: Checkpoint
    plan: Plan
    below: Plan | None
    above: Plan | None
    rate: DiskRate | None
    is_predicted: bool
    has_tokenizer: bool


def plan(values: Values, screen: Screen) -> None:
    """`twoends plan`. Raises DoesNotFit below the floor, and what opening a checkpoint raises."""
    report = make_report(values)
    if values.json:
        screen.line(json.dumps(plan_report_object(report)))
    else:
        draw(report, screen)


def make_report(values: Values) -> PlanReport:
    """Loads what `run` loads before its plan, so that the program's own share is the same."""
    directory = shipped_model() if values.model is None else Path(values.model)
    checkpoint, is_predicted = open_or_predict(directory, latent_eps=values.latent_eps, source=values.source)
    tokenizer = load.open_tokenizer(checkpoint, needed=False)
    choice = load.choose_kernels(values)

    def plan_for(ram_bytes: int) -> Plan:
        return checkpoint.plan(
            ram_bytes=ram_bytes,
            context_tokens=values.context or DEFAULT_CONTEXT,
            chunk_tokens=values.chunk,
            draft_tokens=values.draft,
            num_sequences=values.sequences or 1,
            reference=choice.ops.backend == "reference",
        )

    made = plan_for(load.budget_bytes(values))
    below, above = neighbours(made)
    return PlanReport(
        checkpoint=checkpoint,
        plan=made,
        below=None if below is None else plan_for(below),
        above=None if above is None else plan_for(above),
        rate=rate_under(directory),
        is_predicted=is_predicted,
        has_tokenizer=tokenizer is not None,
    )


def open_or_predict(
    directory: Path, *, latent_eps: float | None, source: Path | None = None
) -> tuple[Checkpoint, bool]:
    """The checkpoint; where there is a config and no weight, what its release would be (and True)."""
    no_weight = not is_pack(directory) and not any(directory.glob("*.safetensors*"))
    if (directory / "config.json").is_file() and no_weight and source is None:
        config = read_config(directory)
        if latent_eps is not None:
            config = config.with_latent_eps(latent_eps)
        index = predicted_index(directory, config)
        return Checkpoint(directory=directory, config=config, index=index), True
    return Checkpoint.open(directory, latent_eps=latent_eps, source=source), False


def neighbours(made: Plan) -> tuple[int | None, int | None]:
    """The budgets that people have next below, not under the floor, and next above, if more helps."""
    # The floor of another process may be a little higher than this one's: its program is measured anew.
    lower = [rung for rung in RUNGS if made.floor_bytes * 1.02 <= rung < made.ram_bytes]
    higher = [rung for rung in RUNGS if rung > made.ram_bytes]
    holds_all = made.streamed_bytes_per_pass == 0 and made.total_bytes + made.slot_bytes < made.ram_bytes
    return (lower[-1] if lower else None), (higher[0] if higher and not holds_all else None)


def plan_report_object(report: PlanReport) -> dict[str, Any]:
    """Every figure of the screen."""
    config = report.checkpoint.config
    rate = report.rate
    return {
        "model": str(report.checkpoint.directory),
        "family": config.family,
        "num_layers": config.num_layers,
        "fingerprint": report.checkpoint.index.fingerprint,
        "predicted": report.is_predicted,
        "missing_tokenizer_bytes": _missing_tokenizer_bytes(report),
        "checkpoint_bytes": report.checkpoint.index.total_bytes,
        **plan_object(report.plan),
        "left_over_bytes": report.plan.ram_bytes - report.plan.total_bytes,
        "disk": None if rate is None else rate.as_object(),
        "estimate_s": None if rate is None else rate.seconds(report.plan.bytes_per_token),
        "below": _rung_object(report.below, rate),
        "above": _rung_object(report.above, rate),
    }


def _missing_tokenizer_bytes(report: PlanReport) -> int:
    return 0 if report.has_tokenizer else report.checkpoint.config.vocab_size * _TOKENIZER_BYTES_PER_TOKEN


def draw(report: PlanReport, screen: Screen) -> None:
    """The screen of style 6.1."""
    plan = report.plan
    heading = model_line(report.checkpoint.config, report.checkpoint.index.total_bytes)
    if report.is_predicted:
        heading = heading.replace("on disk", "to fetch")
    budget = f"budget {format_bytes(plan.ram_bytes)}"
    screen.line(f"{screen.paint(heading, 'bold')}{budget.rjust(COLUMNS - len(heading))}")
    if report.is_predicted:
        screen.line("  no weights are here: sizes are those of this config's release, text only")
    if not report.has_tokenizer:
        more = format_bytes(_missing_tokenizer_bytes(report))
        screen.line(f"  no tokenizer is here: with one, the program takes about {more} more")
    screen.line()
    for line in _row_lines(plan):
        screen.line(line)
    screen.line()
    for name, text in _cost_facts(report):
        screen.line(f"  {name:<10} {text}".rstrip())


def _row_lines(plan: Plan) -> list[str]:
    stays = [row for row in plan.rows if not row.name.endswith(_STREAMED)]
    streams = [row for row in plan.rows if row.name.endswith(_STREAMED)]
    lines = []
    for label, rows in (("stays", stays), ("streams", streams)):
        lines += [_row_line(label if i == 0 else "", row, plan.ram_bytes) for i, row in enumerate(rows)]
    left = Row(name="", num_bytes=plan.ram_bytes - plan.total_bytes, remark="")
    return [*lines, _row_line("left over", left, plan.ram_bytes)]


def _row_line(label: str, row: Row, ram_bytes: int) -> str:
    size = format_bytes(row.num_bytes)
    mark = bar(row.num_bytes / ram_bytes, 8)
    return f"  {label:<10} {row.name:<17} {size:>9}  {mark:<8}  {row.remark}".rstrip()


def _cost_facts(report: PlanReport) -> list[tuple[str, str]]:
    plan, rate = report.plan, report.rate
    parts = (
        f"{format_bytes(plan.streamed_bytes_per_pass)} trunk + {format_bytes(plan.expert_bytes_per_token)}"
    )
    facts = [("one token", f"{parts} experts = {format_bytes(plan.bytes_per_token)}")]
    if plan.num_sequences > 1:
        whole = (
            f"{format_bytes(plan.streamed_bytes_per_pass)} trunk + {format_bytes(plan.expert_bytes_per_pass)}"
        )
        facts = [
            ("one pass", f"{whole} experts, for a token of each of {plan.num_sequences} sequences"),
            ("one token", f"{format_bytes(plan.bytes_per_token)}"),
        ]
    facts.append(("", "at most: experts that are already here are not read again"))
    if rate is None:
        facts.append(("estimate", "none: this disk's rate is not known; measure it:  twoends doctor"))
    else:
        seconds = format_duration(rate.seconds(plan.bytes_per_token))
        origin = f"(twoends doctor, {rate.date})"
        facts.append(("estimate", f"{seconds} of reading at {format_rate(rate.bytes_per_s)} {origin}"))
    facts += [("", ""), ("floor", f"{format_bytes(plan.floor_bytes):>9}   the least budget that runs")]
    for name, rung in (("less", report.below), ("more", report.above)):
        if rung is not None:
            facts.append((name, f"{format_bytes(rung.ram_bytes):>9}   {_cost_text(rung, rate)} a token"))
    return [*facts, ("", "the answer is the same at any budget")]


def _cost_text(rung: Plan, rate: DiskRate | None) -> str:
    num_bytes = rung.bytes_per_token
    return format_bytes(num_bytes) if rate is None else format_duration(rate.seconds(num_bytes))


def _rung_object(rung: Plan | None, rate: DiskRate | None) -> dict[str, Any] | None:
    if rung is None:
        return None
    return {
        "ram_bytes": rung.ram_bytes,
        "bytes_per_token": rung.bytes_per_token,
        "estimate_s": None if rate is None else rate.seconds(rung.bytes_per_token),
    }
