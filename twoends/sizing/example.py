"""A worked example from a public article, number by number, and what it leaves out."""

from __future__ import annotations

from dataclasses import dataclass

from twoends.sizing.evidence import Figure, arithmetic, reported
from twoends.sizing.fit import fit, form_on
from twoends.sizing.footprint import footprint
from twoends.sizing.machines import Accelerator, MachineTable
from twoends.sizing.models import load_model
from twoends.sizing.money import MIXES, BreakEven, break_even
from twoends.sizing.prices import Money, PriceTable
from twoends.sizing.tables import Entry, asset, check_keys, read_toml


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One line of the example."""

    name: str
    figure: Figure
    remark: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """`steps` repeat the article; `left_out` are what it does not count, as steps of their own."""

    source: str
    steps: tuple[Step, ...]
    left_out: tuple[Step, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Facts:
    model: str
    parameters: float
    bits: float
    accelerator: str
    fleet: int
    other: str
    other_bits: float
    source: str


def worked_example(machines: MachineTable, prices: PriceTable) -> Example:
    """The article's arithmetic over the tables that come along. Raises OptionError where a table lacks it."""
    facts = _facts()
    card, other = machines.accelerator(facts.accelerator), machines.accelerator(facts.other)
    rent, other_rent = prices.rents[f"8x{card.name}"], prices.rents[f"8x{other.name}"]
    even = break_even(rent, prices.apis[facts.model], prices)
    return Example(
        source=facts.source,
        steps=(
            *_memory_steps(facts, card),
            *_money_steps(facts, rent, even, card.node),
            *_other_steps(facts, other, other_rent, rent),
        ),
        left_out=_left_out(facts, card, other, rent, prices, even),
    )


def _facts() -> _Facts:
    path = asset("example.toml")
    tables = read_toml(path)
    check_keys(tables, ("example",), path=path)
    entry = Entry(tables.get("example"), path=path, place="example")
    found = _Facts(
        model=entry.text("model"),
        parameters=entry.number("parameters"),
        bits=entry.number("bits"),
        accelerator=entry.text("accelerator"),
        fleet=entry.whole("fleet"),
        other=entry.text("other"),
        other_bits=entry.number("other_bits"),
        source=entry.origin(),
    )
    entry.done()
    return found


def _memory_steps(facts: _Facts, card: Accelerator) -> tuple[Step, ...]:
    weights = facts.parameters * facts.bits / 8
    got = fit(weights, memory_bytes=card.memory_bytes.value, node=card.node)
    name = card.name
    return (
        Step(name="parameters", figure=reported(facts.parameters, "parameters", facts.source)),
        Step(
            name="bits a weight",
            figure=reported(facts.bits, "bits", facts.source),
            remark="4 and 8 for every 32",
        ),
        Step(name="weights", figure=arithmetic(weights, "GB", "parameters x bits / 8")),
        Step(name=f"memory of a {name}", figure=card.memory_bytes),
        Step(
            name=f"{name} for the weights",
            figure=arithmetic(got.by_memory_exact, "count", "weights / memory", of=name),
        ),
        Step(name="so many by memory", figure=arithmetic(got.by_memory, "count", "rounded up", of=name)),
        Step(name="so many by whole nodes", figure=arithmetic(got.count, "count", "nodes of 8", of=name)),
        Step(
            name="memory left over",
            figure=arithmetic(got.left_bytes, "GB", f"{got.count} x memory - weights"),
        ),
        Step(name="its share", figure=arithmetic(got.left_share, "share", "left over / all memory")),
    )


def _money_steps(facts: _Facts, rent: Money, even: BreakEven, node: int) -> tuple[Step, ...]:
    fleet = even.tokens_per_s.value * facts.fleet / node
    return (
        Step(name="rent of the node, an hour", figure=rent.figure()),
        Step(name="the same in dollars", figure=even.hourly.figure()),
        Step(name="output, a million tokens", figure=even.value_per_million),
        Step(name="break-even", figure=even.tokens_per_h),
        Step(name="the same in seconds", figure=even.tokens_per_s),
        Step(
            name=f"{facts.fleet} accelerators",
            figure=arithmetic(fleet, "tokens/s", f"the node's x {facts.fleet} / {node}"),
        ),
    )


def _other_steps(facts: _Facts, other: Accelerator, other_rent: Money, rent: Money) -> tuple[Step, ...]:
    weights = facts.parameters * facts.other_bits / 8
    got = fit(weights, memory_bytes=other.memory_bytes.value, node=other.node)
    total = got.nodes * other_rent.amount
    currency = other_rent.currency
    return (
        Step(
            name=f"weights on {other.generation}",
            figure=arithmetic(weights, "GB", f"parameters x {facts.other_bits:g} bits / 8"),
            remark="no 4-bit floats there",
        ),
        Step(
            name=f"nodes of {other.node} x {other.name}",
            figure=arithmetic(got.nodes, "count", "whole nodes", of="nodes"),
        ),
        Step(name="rent of each, an hour", figure=other_rent.figure()),
        Step(
            name="rent of all",
            figure=arithmetic(total, "money", f"{got.nodes} nodes", of=currency),
        ),
        Step(name="price against the first", figure=arithmetic(total / rent.amount, "ratio", "rents")),
    )


def _left_out(
    facts: _Facts, card: Accelerator, other: Accelerator, rent: Money, prices: PriceTable, even: BreakEven
) -> tuple[Step, ...]:
    """Input, cached input, utilisation, and which weights are 4-bit at all."""
    api = prices.apis[facts.model]
    foot = footprint(load_model(facts.model))
    real, on_other = form_on(foot, card), form_on(foot, other)
    real_fit = fit(real.num_bytes, memory_bytes=card.memory_bytes.value, node=card.node)
    other_fit = fit(on_other.num_bytes, memory_bytes=other.memory_bytes.value, node=other.node)
    agents = break_even(rent, api, prices, mix=MIXES[3])
    half = break_even(rent, api, prices, utilisation=0.5)
    routed = foot.routed_bytes / foot.num_bytes
    return (
        Step(name="input, a million tokens", figure=api.input.figure(), remark="is revenue too"),
        Step(name="cached input, a million", figure=api.cached_input.figure(), remark="is revenue too"),
        Step(
            name=f"break-even at {agents.mix.name}",
            figure=agents.tokens_per_s,
            remark="output; input comes along",
        ),
        Step(
            name="busy half the time",
            figure=half.busy_tokens_per_s,
            remark="the node never rests there",
        ),
        Step(
            name="the real checkpoint",
            figure=arithmetic(real.num_bytes, "GB", "every tensor of the released layout"),
            remark="only routed experts are MXFP4",
        ),
        Step(
            name="routed experts in it",
            figure=arithmetic(routed, "share", "bytes of routed experts / of all tensors"),
            remark="the rest is BF16",
        ),
        Step(
            name="left over in truth",
            figure=arithmetic(real_fit.left_bytes, "GB", f"{real_fit.count} x memory - checkpoint"),
            remark="for state and latent cache",
        ),
        Step(
            name=f"on {other.generation} in truth",
            figure=arithmetic(on_other.num_bytes, "GB", "experts at 8 bits, the rest BF16"),
            remark="8 bits for experts only",
        ),
        Step(
            name=f"{other.name} for that",
            figure=arithmetic(other_fit.by_memory, "count", "weights / memory, rounded up", of=other.name),
        ),
    )
