"""The sections about money: an hour against the API's prices, at every load and mix, rented or owned."""

from __future__ import annotations

from twoends.sizing.evidence import arithmetic, reported
from twoends.sizing.example import Example, Step
from twoends.sizing.footprint import Footprint
from twoends.sizing.machine_sections import speeds_by_load
from twoends.sizing.machines import Machine
from twoends.sizing.money import (
    RENT_FACTORS,
    BreakEven,
    break_even,
    needed_utilisation,
    owning_cost,
    sensitivity,
)
from twoends.sizing.prices import ApiPrice, Money
from twoends.sizing.report import Cell, Chart, Line, Question, Section, Series, Table
from twoends.sizing.speed import Speed


def money_section(foot: Footprint, question: Question, machine: Machine | None) -> Section:
    """Break-even of what an hour costs, or why there is none. Raises OptionError for unknown currencies."""
    title = "Money: when owning or renting beats the API"
    name = question.model.release
    api = None if name is None else question.prices.apis.get(name)
    if api is None:
        note = f"No API price of {question.model.name} is known; put it in a file:  --prices FILE"
        return Section(key="money", title=title, notes=(note,))
    hourly, lines = _hourly(question, machine, api)
    if hourly is None:
        note = "What an hour costs is not known; say it, --rent 56.24USD, or own: --buy, --years, --energy."
        return Section(key="money", title=title, lines=tuple(_price_lines(api)), notes=(note,))
    even = break_even(hourly, api, question.prices, mix=question.mix, utilisation=question.utilisation)
    loads = [] if machine is None else speeds_by_load(foot, question, machine)
    tables = [_sensitivity_table(hourly, api, question)]
    if loads:
        tables.append(_load_table(loads, even))
    return Section(
        key="money",
        title=title,
        lines=(*_price_lines(api), *lines, *_even_lines(even, question)),
        tables=tuple(tables),
        charts=(_chart(loads, hourly, api, question),) if loads else (),
        notes=("Speeds at best are bounds: a real server gives less, so the load it needs is higher.",),
    )


def example_section(example: Example) -> Section:
    """The worked example, and what it leaves out."""

    def lines(steps: tuple[Step, ...], prefix: str) -> tuple[Line, ...]:
        return tuple(
            Line(key=f"{prefix}_{i + 1}", name=step.name, figure=step.figure, remark=step.remark)
            for i, step in enumerate(steps)
        )

    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (step.name, step.figure, step.remark) for step in example.left_out
    )
    table = Table(
        key="left_out", title="what the example leaves out", columns=("", "figure", "remark"), rows=rows
    )
    return Section(
        key="example",
        title="A worked example from a public article",
        lines=lines(example.steps, "step"),
        tables=(table,),
    )


def _hourly(question: Question, machine: Machine | None, api: ApiPrice) -> tuple[Money | None, list[Line]]:
    """An hour's cost: owned, as given, or the table's rent of as many nodes."""
    if question.owning is not None:
        cost = owning_cost(
            question.owning, question.prices, currency=question.currency or api.output.currency
        )
        return cost.hourly, [
            Line(key="price", name="price of the machine", figure=question.owning.price.figure()),
            Line(key="depreciation", name="written off, an hour", figure=cost.depreciation.figure()),
            Line(key="power", name="power, an hour", figure=cost.power.figure()),
            Line(key="hourly", name="owning, an hour", figure=cost.hourly.figure()),
        ]
    rent = question.rent or _table_rent(question, machine)
    if rent is None:
        return None, []
    lines = [Line(key="hourly", name="rent, an hour", figure=rent.figure())]
    shown = question.currency or api.output.currency
    if shown != rent.currency:
        converted = question.prices.convert(rent, shown)
        lines.append(Line(key="hourly_converted", name=f"the same in {shown}", figure=converted.figure()))
    return rent, lines


def _table_rent(question: Question, machine: Machine | None) -> Money | None:
    """Of whole groups that the table has a rent for."""
    if machine is None or machine.accelerator is None:
        return None
    for what, rent in question.prices.rents.items():
        count, card = question.machines.group(what)
        if card.name == machine.accelerator.name and machine.count % count == 0:
            groups = machine.count // count
            if groups == 1:
                return rent
            return Money(
                amount=rent.amount * groups,
                currency=rent.currency,
                kind="arithmetic",
                source=f"{groups} x {what}: {rent.source}",
            )
    return None


def _price_lines(api: ApiPrice) -> list[Line]:
    names = (
        ("api_input", "API, input", api.input),
        ("api_cached_input", "API, cached input", api.cached_input),
        ("api_output", "API, output", api.output),
    )
    return [Line(key=key, name=f"{name}, a million", figure=price.figure()) for key, name, price in names]


def _even_lines(even: BreakEven, question: Question) -> list[Line]:
    lines = [
        Line(
            key="value_per_million",
            name=f"a million output at {even.mix.name}",
            figure=even.value_per_million,
            remark="with the input that comes along (input:cached:output)",
        ),
        Line(key="break_even_tokens_per_h", name="break-even", figure=even.tokens_per_h),
        Line(key="break_even_tokens_per_s", name="around the clock", figure=even.tokens_per_s),
    ]
    if even.utilisation < 1:
        share = reported(even.utilisation, "share", "as given on the command line")
        lines.append(Line(key="utilisation", name="busy share of the time", figure=share))
        lines.append(Line(key="busy_tokens_per_s", name="while busy", figure=even.busy_tokens_per_s))
    if question.tokens_per_s is not None:
        rate = reported(question.tokens_per_s, "tokens/s", "as given on the command line")
        lines.append(Line(key="your_tokens_per_s", name="your server's speed", figure=rate))
        lines.append(
            Line(
                key="needed_utilisation",
                name="it must be busy",
                figure=needed_utilisation(even, question.tokens_per_s),
                remark="above 100 % it never pays" if question.tokens_per_s < even.tokens_per_s.value else "",
            )
        )
    return lines


def _sensitivity_table(hourly: Money, api: ApiPrice, question: Question) -> Table:
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (mix.name, *(point.busy_tokens_per_s for point in points))
        for mix, points in sensitivity(hourly, api, question.prices, utilisation=question.utilisation)
    )
    columns = ("mix \\ rent", *(f"x {factor:g}" for factor in RENT_FACTORS))
    return Table(
        key="sensitivity",
        title="break-even by mix (input:cached:output) and rent, output tokens while busy",
        columns=columns,
        rows=rows,
    )


def _load_table(loads: list[tuple[int, Speed]], even: BreakEven) -> Table:
    rows = tuple(
        (
            f"{sequences}",
            arithmetic(one.tokens_per_s, "tokens/s", "tokens of a pass / time of the slowest link"),
            needed_utilisation(even, one.tokens_per_s),
            "pays" if one.tokens_per_s * even.utilisation >= even.tokens_per_s.value else "never pays",
        )
        for sequences, one in loads
    )
    columns = ("sequences", "speed at best", "must be busy", "")
    return Table(key="load", title="at which load it pays", columns=columns, rows=rows)


def _chart(loads: list[tuple[int, Speed]], hourly: Money, api: ApiPrice, question: Question) -> Chart:
    best = Series(name="speed at best", points=tuple((float(n), one.tokens_per_s) for n, one in loads))
    levels = []
    for mix, points in sensitivity(hourly, api, question.prices, utilisation=question.utilisation):
        level = points[RENT_FACTORS.index(1.0)].busy_tokens_per_s.value
        ends = (loads[0][0], loads[-1][0])
        levels.append(
            Series(name=f"break-even {mix.name}", points=tuple((float(n), level) for n in ends), dashed=True)
        )
    return Chart(
        key="break_even",
        title="Break-even",
        about="Above a dashed level the machine earns what it costs at that mix of tokens.",
        x_label="sequences at once",
        y_label="output tokens per second",
        x_unit="",
        y_unit="tokens/s",
        series=(best, *levels),
    )
