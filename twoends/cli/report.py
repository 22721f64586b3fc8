"""What a run gave: the card at its end, and the object that --json prints."""

from __future__ import annotations

import dataclasses
import hashlib
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from twoends.cli.run_draft import DraftJob, draft_model_object
from twoends.cli.screen import Screen, plural, share_text
from twoends.engine.budget import Plan
from twoends.engine.device import DiskRate
from twoends.engine.files import WeightFiles
from twoends.engine.reader import ReadShape
from twoends.engine.trace import Counters
from twoends.generate.generator import Outcome
from twoends.kernels.choose import Choice
from twoends.units import format_bytes, format_duration, format_rate

_SOURCES = {"lookup": "the text so far", "model": "the draft model"}
_ENDS = {"stop_id": "by the model, with a stop token", "stop_string": "at a text of --stop"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """The facts of one finished run."""

    model: Path
    fingerprint: str
    prompt_ids: list[int]
    outcome: Outcome
    plan: Plan
    counters: Counters
    choice: Choice
    files: WeightFiles
    read_shape: ReadShape
    disk: DiskRate | None
    policy: str
    held_bytes: int
    peak_bytes: int
    wall_s: float
    session: Path | None
    draft: DraftJob | None = None
    draft_bytes_read: int = 0


def ids_digest(ids: list[int]) -> str:
    """ "b2:" and 8 hex digits: BLAKE2b-32 of the ids as little-endian 32-bit words."""
    data = np.array(ids, "<u4").tobytes()
    return f"b2:{hashlib.blake2b(data, digest_size=4).hexdigest()}"


def plan_object(plan: Plan) -> dict[str, Any]:
    """Every field of a plan, and what follows from them."""
    fields = dataclasses.asdict(plan)
    derived = (
        "total_bytes",
        "floor_bytes",
        "streamed_bytes_per_pass",
        "expert_bytes_per_token",
        "expected_bytes_per_token",
    )
    return {**fields, **{name: getattr(plan, name) for name in (*derived, "bytes_per_token")}}


def counted_object(counters: Counters) -> dict[str, int]:
    """What was read and asked for, as every report with --json tells it."""
    return {
        "bytes_read": counters.bytes_read,
        "bytes_trunk": counters.bytes_trunk,
        "bytes_experts": counters.bytes_experts,
        "bytes_embedding": counters.bytes_embedding,
        "num_reads": counters.num_reads,
        "expert_requests": counters.expert_requests,
        "expert_hits": counters.expert_hits,
    }


def run_object(report: RunReport) -> dict[str, Any]:
    """What --json prints. Sizes in bytes, times in seconds."""
    outcome, counters = report.outcome, report.counters
    return {
        "model": str(report.model),
        "fingerprint": report.fingerprint,
        "prompt_ids": report.prompt_ids,
        "ids": outcome.ids,
        "text": outcome.text,
        "finish": outcome.finish,
        "ids_digest": ids_digest(outcome.ids),
        "logits_digest": outcome.logits_digest,
        "position_digests": outcome.position_digests,
        "ram_bytes": report.plan.ram_bytes,
        "peak_rss_bytes": report.peak_bytes,
        "held_bytes": report.held_bytes,
        "plan": plan_object(report.plan),
        **counted_object(counters),
        "policy": report.policy,
        "look_ahead": _look_ahead_object(report),
        "num_drafted": outcome.num_drafted,
        "num_accepted": outcome.num_accepted,
        "drafts": {name: dataclasses.asdict(tally) for name, tally in outcome.drafts.items()},
        "draft_model": draft_model_object(report.draft, report.draft_bytes_read),
        "wait_s": counters.wait_s,
        "num_waits": counters.num_waits,
        "expert_waits": counters.expert_waits,
        "expert_wait_s": counters.expert_wait_s,
        "reading_s": counters.reading_s,
        "read_bytes_per_s": counters.bytes_read / counters.reading_s if counters.reading_s else None,
        "read_piece_bytes": report.read_shape.piece_bytes,
        "read_depth": report.read_shape.depth,
        "disk": None if report.disk is None else report.disk.as_object(),
        "prefill_s": outcome.prefill_s,
        "decode_s": outcome.decode_s,
        "token_s": outcome.token_s,
        "wall_s": report.wall_s,
        "kernels": {
            "backend": report.choice.ops.backend,
            "isa": report.choice.isa,
            "threads": report.choice.threads,
            "reasons": dict(report.choice.reasons),
        },
        "direct_io": report.files.direct,
        "direct_io_reason": report.files.reason,
        "session": None if report.session is None else str(report.session),
    }


def _look_ahead_object(report: RunReport) -> dict[str, Any]:
    counters = report.counters
    return {
        "mode": report.plan.look_ahead,
        "choices_guessed": counters.choices_guessed,
        "choices_right": counters.choices_right,
        "read": counters.guesses_read,
        "useful": counters.guesses_useful,
        "late": counters.guesses_late,
        "wasted": counters.guesses_wasted,
        "withdrawn": counters.guesses_withdrawn,
        "bytes_wasted": counters.bytes_wasted,
    }


def draw_card(report: RunReport, screen: Screen) -> None:
    """The end card: what it took, and the digests to compare with another run."""
    outcome, counters = report.outcome, report.counters
    busy_s = outcome.prefill_s + outcome.decode_s
    rows = [
        (plural(len(outcome.ids), "token"), _speed(outcome)),
        ("prompt", f"{plural(len(report.prompt_ids), 'token')} in {format_duration(outcome.prefill_s)}"),
        (
            "read",
            f"{format_bytes(counters.bytes_read)}   "
            f"{share_text(counters.wait_s, busy_s)} of the time waiting for the disk",
        ),
        ("disk", _device_text(report)),
        (
            "experts",
            f"{counters.expert_requests:,} asked, {counters.expert_hits:,} already here "
            f"({share_text(counters.expert_hits, counters.expert_requests)})",
        ),
        ("guesses", _guess_text(report)),
        ("memory", f"{format_bytes(report.peak_bytes)} at most, of {format_bytes(report.plan.ram_bytes)}"),
    ]
    for source, tally in outcome.drafts.items():
        if tally.drafted:
            share = share_text(tally.accepted, tally.drafted)
            rows.append(
                ("drafts", f"{tally.drafted:,} from {_SOURCES[source]}, {tally.accepted:,} right ({share})")
            )
    if report.draft is not None:
        rows.append(("drafter", f"{format_bytes(report.draft_bytes_read)} more read"))
    if outcome.finish in _ENDS:
        rows.insert(1, ("ended", _ENDS[outcome.finish]))
    if report.session is not None:
        rows.append(("session", f"{report.session}"))
    rows.append(
        ("ids", f"{ids_digest(outcome.ids)}   logits b2:{outcome.logits_digest[:8]}   equal at every budget")
    )
    screen.note()
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        screen.note(f"  {name:<{width}}   {text}")


def _guess_text(report: RunReport) -> str:
    """What came of experts that were read on a guess, or why none was."""
    counters = report.counters
    if not counters.choices_guessed:
        return report.plan.look_ahead
    right = f"{share_text(counters.choices_right, counters.choices_guessed)} of guesses right"
    if not counters.guesses_read:
        return f"{right}; none was worth a read"
    parts = ("useful", "late", "wasted", "withdrawn")
    ends = ", ".join(f"{getattr(counters, f'guesses_{part}'):,} {part}" for part in parts)
    return f"{right}; {counters.guesses_read:,} read: {ends}"


def _device_text(report: RunReport) -> str:
    """The device's rate while it was read, against what `doctor` measured of it."""
    counters = report.counters
    if not counters.reading_s:
        return "not read"
    rate = counters.bytes_read / counters.reading_s
    if report.disk is None:
        return f"{format_rate(rate)} while reading; no figure of its own (twoends doctor)"
    best = report.disk.bytes_per_s
    return f"{format_rate(rate)} while reading, {share_text(rate, best)} of the doctor's {format_rate(best)}"


def _speed(outcome: Outcome) -> str:
    if not outcome.token_s:
        return "from the prompt's pass alone"
    times = outcome.token_s
    low, high = format_duration(min(times)), format_duration(max(times))
    return f"{format_duration(statistics.median(times))} each ({low} to {high})"
