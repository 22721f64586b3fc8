"""The ladder: one machine at several budgets; memory buys time. And the bytes of a token by load."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from twoends.errors import DoesNotFit
from twoends.sizing.evidence import arithmetic
from twoends.sizing.footprint import Footprint
from twoends.sizing.links import ZEN4_CORE, CoreRate
from twoends.sizing.machines import Machine
from twoends.sizing.routing import RoutingCurve, Rows, curve_of, uniform_distinct
from twoends.sizing.speed import Speed, speed

LOADS = (1, 2, 4, 8, 12, 16, 32, 64, 128, 256, 512)
DRAFTS = (1, 2, 3, 4, 5, 7)
ACCEPTANCES = (0.5, 0.7, 0.9)
_GB = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRow:
    """Bytes of one token when n share a pass; "streamed" reads trunk and experts, "resident" experts only.

    Embedding and head stay in memory in both. The measured columns hold for n tokens of one text.
    """

    tokens: int
    distinct: float
    streamed_bytes: float
    resident_bytes: float
    measured_distinct: float | None
    measured_streamed_bytes: float | None
    measured_resident_bytes: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRow:
    """Bytes per token of plain decoding over those with `drafts` verified at once; above 1 is a gain."""

    drafts: int
    acceptance: float
    tokens_per_pass: float
    streamed_gain: float
    resident_gain: float


def load_rows(foot: Footprint) -> tuple[LoadRow, ...]:
    """One row per number of tokens that share a pass."""
    config, curve = foot.model.config, curve_of(foot.model)
    rows = []
    for tokens in LOADS:
        distinct = uniform_distinct(config, tokens)
        streamed, resident = _bytes(foot, distinct, tokens)
        real = None if curve is None or tokens > curve.most_rows else curve.distinct_at(tokens)
        pair = (None, None) if real is None else _bytes(foot, real, tokens)
        rows.append(
            LoadRow(
                tokens=tokens,
                distinct=distinct,
                streamed_bytes=streamed,
                resident_bytes=resident,
                measured_distinct=real,
                measured_streamed_bytes=pair[0],
                measured_resident_bytes=pair[1],
            )
        )
    return tuple(rows)


def draft_rows(foot: Footprint, curve: RoutingCurve) -> tuple[DraftRow, ...]:
    """What speculation is worth, the drafts being free: only bytes are counted."""
    rows = []
    plain_streamed, plain_resident = _bytes(foot, curve.distinct_at(1), 1)
    for acceptance in ACCEPTANCES:
        for drafts in DRAFTS:
            if drafts + 1 > curve.most_rows:
                continue
            given = Rows(drafts=drafts, acceptance=acceptance).tokens_per_pass
            streamed, resident = _bytes(foot, curve.distinct_at(drafts + 1), given)
            rows.append(
                DraftRow(
                    drafts=drafts,
                    acceptance=acceptance,
                    tokens_per_pass=given,
                    streamed_gain=plain_streamed / streamed,
                    resident_gain=plain_resident / resident,
                )
            )
    return tuple(rows)


def ladder(
    foot: Footprint, machine: Machine, rows: Rows, *, context_tokens: int, core: CoreRate = ZEN4_CORE
) -> tuple[Speed, ...]:
    """The machine at every budget that people have, from the first that fits to the first that holds all.

    With accelerators a rung is a number of them; without, a size of the host's memory.
    """
    found: list[Speed] = []
    for rung in _rungs(machine):
        try:
            found.append(speed(foot, rung, rows, context_tokens=context_tokens, core=core))
        except DoesNotFit:
            continue
        if found[-1].regime == "resident":
            break
    return tuple(found)


def _rungs(machine: Machine) -> list[Machine]:
    if machine.accelerator is None:
        sizes = {float(gb * 10**9) for gb in _GB}
        if machine.ram_bytes is not None:
            sizes.add(machine.ram_bytes.value)
        return [_with_ram(machine, size) for size in sorted(sizes)]
    node = machine.accelerator.node
    counts = {1, 2, 4, *range(node, 8 * node + 1, node), machine.count}
    return [dataclasses.replace(machine, count=count) for count in sorted(counts)]


def _with_ram(machine: Machine, size: float) -> Machine:
    ram = machine.ram_bytes
    if ram is None or ram.value != size:
        ram = arithmetic(size, "bytes", "a rung of the ladder")
    return dataclasses.replace(machine, ram_bytes=ram)


def _bytes(foot: Footprint, distinct: float, tokens: float) -> tuple[float, float]:
    experts = len(foot.model.config.moe_layers) * distinct * foot.expert_bytes
    return (foot.trunk_bytes + experts) / tokens, experts / tokens
