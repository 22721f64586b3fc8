"""The sections about machines: which of them hold the model, how fast the asked one is, and its ladder."""

from __future__ import annotations

import dataclasses

from twoends.errors import DoesNotFit
from twoends.sizing.evidence import arithmetic
from twoends.sizing.fit import fit, form_on, sequences_that_fit
from twoends.sizing.footprint import Footprint
from twoends.sizing.ladder import LOADS, ladder
from twoends.sizing.machines import Machine
from twoends.sizing.report import Cell, Chart, Line, Question, Section, Series, Table
from twoends.sizing.routing import Rows
from twoends.sizing.speed import Speed, speed

_SIDE_BY_SIDE = "tokens of a pass / time of the slowest link"


def fit_section(foot: Footprint, question: Question) -> Section:
    """Accelerators by memory and node, in the formats that they take; then every machine of the table."""
    counts: list[tuple[Cell, ...]] = []
    for card in question.machines.accelerators.values():
        form = form_on(foot, card, experts_as=question.experts_as)
        got = fit(form.num_bytes, memory_bytes=card.memory_bytes.value, node=card.node)
        room = sequences_that_fit(foot, got.left_bytes, context_tokens=question.context_tokens)
        counts.append(
            (
                card.name,
                form.experts_as,
                arithmetic(
                    form.num_bytes, "GB", f"experts in {form.experts_as} ({form.reason}), rest as released"
                ),
                arithmetic(got.by_memory, "count", "weights / memory of one, rounded up"),
                arithmetic(got.count, "count", f"whole nodes of {card.node}"),
                arithmetic(got.left_bytes, "GB", "memory of the whole nodes - weights"),
                arithmetic(
                    room, "count", f"left over / state and cache of {question.context_tokens:,} tokens"
                ),
            )
        )
    columns = ("", "experts", "weights", "by memory", "by node", "left over", "sequences")
    table = Table(
        key="accelerators", title="accelerators that hold the weights", columns=columns, rows=tuple(counts)
    )
    formats = {card.generation: card.formats for card in question.machines.accelerators.values()}
    notes = (
        "Formats: "
        + "; ".join(f"{name} multiplies {', '.join(known)}" for name, known in formats.items())
        + ".",
        "Where an accelerator can't multiply the released 4-bit floats, experts are counted at 8 bits; "
        "kernels that unpack 4-bit weights on their way would keep the released size (--experts-as MXFP4).",
        "Activations and the serving program's own memory are not counted.",
    )
    return Section(key="fit", title="What fits", tables=(table, _machine_table(foot, question)), notes=notes)


def _machine_table(foot: Footprint, question: Question) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for machine in question.machines.machines.values():
        try:
            found = speed(foot, machine, question.rows, context_tokens=question.context_tokens)
        except DoesNotFit:
            rows.append((machine.name, "does not fit", "", ""))
            continue
        rate = arithmetic(found.tokens_per_s, "tokens/s", f"{_SIDE_BY_SIDE}; {machine.source}")
        rows.append((machine.name, found.regime, rate, found.wall.name))
    return Table(
        key="machines",
        title="machines of the table, at best",
        columns=("machine", "weights", "speed at best", "wall"),
        rows=tuple(rows),
    )


def speed_section(foot: Footprint, question: Question, machine: Machine) -> Section:
    """One machine: bytes and time of every link, the wall, the ladder. Raises DoesNotFit, OptionError."""
    found = speed(
        foot,
        machine,
        question.rows,
        context_tokens=question.context_tokens,
        core=question.core,
        experts_as=question.experts_as,
    )
    wall = found.wall
    demand = found.demand
    lines = (
        Line(
            key="bytes_per_pass",
            name="weights of a pass",
            figure=arithmetic(demand.weight_bytes, "GB", "trunk + head + layers x distinct experts"),
            remark=found.regime,
        ),
        Line(
            key="distinct_experts",
            name="distinct experts a layer",
            figure=arithmetic(demand.distinct, "count", demand.curve),
        ),
        Line(
            key="pass_s",
            name="a pass, links side by side",
            figure=arithmetic(found.pass_s, "s", f"the wall: {wall.name}"),
            remark=f"the wall: {wall.name}",
        ),
        Line(
            key="serial_s",
            name="a pass, one by one",
            figure=arithmetic(found.serial_s, "s", "sum of all links"),
        ),
        Line(
            key="tokens_per_s",
            name="speed at best",
            figure=arithmetic(found.tokens_per_s, "tokens/s", _SIDE_BY_SIDE),
            remark="a bound from above, not a promise",
        ),
    )
    steps = ladder(foot, machine, question.rows, context_tokens=question.context_tokens, core=question.core)
    return Section(
        key="speed",
        title=f"Speed on {machine.name}" + (f", {machine.about}" if machine.about else ""),
        lines=lines,
        tables=(_link_table(found), _tier_table(found), _ladder_table(steps)),
        charts=(_ladder_chart(steps), _roofline(foot, question, machine)),
    )


def _link_table(found: Speed) -> Table:
    rows = tuple(
        (
            link.name,
            arithmetic(link.num_bytes, "GB", link.how),
            link.rate,
            arithmetic(link.seconds, "s", "bytes / rate"),
        )
        for link in found.links
    )
    return Table(key="links", title="links of one pass", columns=("link", "bytes", "rate", "time"), rows=rows)


def _tier_table(found: Speed) -> Table:
    rows = tuple(
        (
            tier.name,
            arithmetic(tier.size_bytes, "GB", "as the machine has it"),
            arithmetic(tier.reserved_bytes, "GB", "state, cache, program"),
            arithmetic(tier.trunk_bytes, "GB", "trunk and head come first"),
            arithmetic(tier.expert_bytes, "GB", "what is left holds experts"),
            arithmetic(
                tier.hit_share,
                "share",
                "the better of the measured curve (straight on from its end) and a fixed share",
            ),
        )
        for tier in found.tiers
    )
    columns = ("memory", "size", "reserved", "trunk, head", "experts", "hits")
    return Table(key="tiers", title="what is where", columns=columns, rows=rows)


def _ladder_table(steps: tuple[Speed, ...]) -> Table:
    rows = tuple(
        (
            _rung_name(step),
            step.regime,
            arithmetic(1 / step.tokens_per_s, "s", "a pass / tokens of a pass, links side by side"),
            arithmetic(step.tokens_per_s, "tokens/s", _SIDE_BY_SIDE),
            step.wall.name,
        )
        for step in steps
    )
    columns = ("budget", "weights", "a token", "speed at best", "wall")
    return Table(key="ladder", title="ladder of budgets", columns=columns, rows=rows)


def _rung_name(step: Speed) -> str:
    machine = step.machine
    if machine.accelerator is not None:
        return f"{machine.count} x {machine.accelerator.name}"
    return "" if machine.ram_bytes is None else machine.ram_bytes.text


def _ladder_chart(steps: tuple[Speed, ...]) -> Chart:
    on_host = bool(steps) and steps[0].machine.accelerator is None
    points = tuple(
        (
            (step.machine.ram_bytes.value if on_host and step.machine.ram_bytes else step.machine.count),
            1 / step.tokens_per_s,
        )
        for step in steps
    )
    return Chart(
        key="ladder",
        title="Ladder: memory buys time",
        about="Seconds a token at every budget, all links working side by side.",
        x_label="budget" if on_host else "accelerators",
        y_label="seconds a token",
        x_unit="bytes" if on_host else "",
        y_unit="s",
        series=(Series(name="at best", points=tuple((float(x), y) for x, y in points)),),
    )


def _roofline(foot: Footprint, question: Question, machine: Machine) -> Chart:
    """What each link alone would allow, over the number of sequences; the lowest curve is the roof."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for sequences in LOADS:
        rows = dataclasses.replace(question.rows, sequences=sequences)
        found = _speed_if_it_fits(foot, question, machine, rows)
        if found is None:
            break
        for link in found.links:
            rate = found.demand.rows.tokens_per_pass / link.seconds
            curves.setdefault(link.name, []).append((float(sequences), rate))
    return Chart(
        key="roofline",
        title="Roofline of bytes",
        about="Tokens per second that each link alone would allow; the lowest curve is the roof.",
        x_label="sequences at once",
        y_label="tokens per second",
        x_unit="",
        y_unit="tokens/s",
        series=tuple(Series(name=name, points=tuple(points)) for name, points in curves.items()),
    )


def _speed_if_it_fits(foot: Footprint, question: Question, machine: Machine, rows: Rows) -> Speed | None:
    try:
        return speed(
            foot, machine, rows, context_tokens=question.context_tokens, core=question.core,
            experts_as=question.experts_as,
        )  # fmt: skip
    except DoesNotFit:
        return None


def speeds_by_load(foot: Footprint, question: Question, machine: Machine) -> list[tuple[int, Speed]]:
    """(sequences, speed) for every load that has room in memory."""
    found = []
    for sequences in LOADS:
        rows = dataclasses.replace(question.rows, sequences=sequences)
        one = _speed_if_it_fits(foot, question, machine, rows)
        if one is None:
            break
        found.append((sequences, one))
    return found
