"""Money: what an hour costs, what the same tokens cost by the API, and at which load the two are equal."""

from __future__ import annotations

import re
from dataclasses import dataclass

from twoends.errors import OptionError
from twoends.sizing.evidence import Figure, arithmetic
from twoends.sizing.prices import ApiPrice, Money, PriceTable

HOURS_PER_YEAR = 8760
_MIX = re.compile(r"([0-9]+(?:\.[0-9]+)?):([0-9]+(?:\.[0-9]+)?):([0-9]+(?:\.[0-9]+)?)")
RENT_FACTORS = (0.5, 0.75, 1.0, 1.5, 2.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """Tokens of each kind, in proportion: input that is new, input that is cached, output."""

    input: float
    cached_input: float
    output: float

    @property
    def name(self) -> str:
        """ "3:7:1"."""
        return f"{self.input:g}:{self.cached_input:g}:{self.output:g}"


OUTPUT_ONLY = Mix(input=0, cached_input=0, output=1)
# From answers alone to agents that read a long context again and again.
MIXES = (
    OUTPUT_ONLY,
    Mix(input=1, cached_input=0, output=1),
    Mix(input=3, cached_input=0, output=1),
    Mix(input=3, cached_input=7, output=1),
    Mix(input=2, cached_input=18, output=1),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Owning:
    """A machine bought: its price written off evenly down to what it still fetches, and its power."""

    price: Money
    years: float
    residual_share: float
    watts: Figure
    overhead: float
    energy: Money

    def __post_init__(self) -> None:
        checks = (("--years", self.years), ("--pue", self.overhead), ("--watts", self.watts.value))
        for flag, value in checks:
            if not value > 0:
                raise OptionError(f"{flag} is {value:g}; it must be above zero.")
        if not 0 <= self.residual_share < 1:
            raise OptionError(f"--residual is {self.residual_share:g}; it must be 0 or more, and below 1.")
        if self.overhead < 1:
            raise OptionError(f"--pue is {self.overhead:g}; a building takes at least what is in it, 1.")


@dataclass(frozen=True, slots=True, kw_only=True)
class OwningCost:
    """Per hour, whether it works or not."""

    depreciation: Money
    power: Money

    @property
    def hourly(self) -> Money:
        """Both."""
        amount = self.depreciation.amount + self.power.amount
        how = "depreciation + power"
        return Money(amount=amount, currency=self.power.currency, kind="arithmetic", source=how)


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakEven:
    """The load at which an hour's cost equals what the API asks for the same tokens.

    Output tokens are counted; input comes along in the mix's proportion. `busy_tokens_per_s` is the rate
    needed while busy, where only `utilisation` of the time is.
    """

    hourly: Money
    mix: Mix
    value_per_million: Figure
    tokens_per_h: Figure
    tokens_per_s: Figure
    utilisation: float
    busy_tokens_per_s: Figure


def parse_mix(word: str) -> Mix:
    """ "3:7:1": input, cached input, output. Raises OptionError."""
    match = _MIX.fullmatch(word.strip())
    if match is None:
        raise OptionError(
            f"'{word}' is not a mix of tokens.", remedies=["Write input:cached:output, like 3:7:1 or 0:0:1"]
        )
    mix = Mix(input=float(match[1]), cached_input=float(match[2]), output=float(match[3]))
    if mix.output <= 0:
        raise OptionError(f"the mix '{word}' has no output; break-even is counted in output tokens.")
    return mix


def value_per_million(api: ApiPrice, mix: Mix, prices: PriceTable, *, currency: str) -> Figure:
    """What the API asks for a million output tokens with the input that comes along."""
    amounts = [prices.convert(m, currency).amount for m in (api.input, api.cached_input, api.output)]
    parts = (mix.input, mix.cached_input, mix.output)
    value = sum(part * amount for part, amount in zip(parts, amounts, strict=True)) / mix.output
    terms = f"({mix.name}) x ({amounts[0]:g}, {amounts[1]:g}, {amounts[2]:g}) / {mix.output:g}"
    return arithmetic(value, "money", f"{terms}; prices: {api.output.source}", of=currency)


def break_even(
    hourly: Money, api: ApiPrice, prices: PriceTable, *, mix: Mix = OUTPUT_ONLY, utilisation: float = 1.0
) -> BreakEven:
    """Raises OptionError for a utilisation that is none, or currencies without an exchange rate."""
    if not 0 < utilisation <= 1:
        raise OptionError(f"--utilisation is {utilisation:g}; it must be above 0 and at most 1.")
    currency = api.output.currency
    cost = prices.convert(hourly, currency)
    value = value_per_million(api, mix, prices, currency=currency)
    tokens_per_h = cost.amount / value.value * 1e6
    per_s = tokens_per_h / 3600
    return BreakEven(
        hourly=cost,
        mix=mix,
        value_per_million=value,
        tokens_per_h=arithmetic(tokens_per_h, "tokens/h", "hourly cost / value of a million output tokens"),
        tokens_per_s=arithmetic(per_s, "tokens/s", "the same / 3,600 s, around the clock"),
        utilisation=utilisation,
        busy_tokens_per_s=arithmetic(
            per_s / utilisation, "tokens/s", f"the same / utilisation {utilisation:g}"
        ),
    )


def needed_utilisation(point: BreakEven, capacity_tokens_per_s: float) -> Figure:
    """The share of the time in which a machine of that speed must be busy; above 1 it never pays."""
    share = point.tokens_per_s.value / capacity_tokens_per_s
    return arithmetic(share, "share", f"break-even rate / {capacity_tokens_per_s:,.0f} tokens/s")


def sensitivity(
    hourly: Money, api: ApiPrice, prices: PriceTable, *, utilisation: float
) -> tuple[tuple[Mix, tuple[BreakEven, ...]], ...]:
    """Break-even at every mix, over multiples of the hourly cost (RENT_FACTORS)."""

    def at(mix: Mix, factor: float) -> BreakEven:
        cost = Money(amount=hourly.amount * factor, currency=hourly.currency, source=hourly.source)
        return break_even(cost, api, prices, mix=mix, utilisation=utilisation)

    return tuple((mix, tuple(at(mix, factor) for factor in RENT_FACTORS)) for mix in MIXES)


def owning_cost(owning: Owning, prices: PriceTable, *, currency: str) -> OwningCost:
    """An hour of a bought machine."""
    price = prices.convert(owning.price, currency).amount
    energy = prices.convert(owning.energy, currency).amount
    hours = owning.years * HOURS_PER_YEAR
    lost = price * (1 - owning.residual_share) / hours
    how = (
        f"{price:,.0f} {currency} x (1 - {owning.residual_share:g}) / ({owning.years:g} x {HOURS_PER_YEAR} h)"
    )
    kilowatts = owning.watts.value / 1000 * owning.overhead
    power = f"{kilowatts:,.2f} kW at the wall (PUE {owning.overhead:g}) x {energy:g} {currency} a kWh"
    return OwningCost(
        depreciation=Money(amount=lost, currency=currency, kind="arithmetic", source=how),
        power=Money(amount=kilowatts * energy, currency=currency, kind="arithmetic", source=power),
    )
