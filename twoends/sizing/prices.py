"""Prices: exchange rates, rents, what an API asks. From files with source and date; nothing is fetched."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from twoends.errors import OptionError
from twoends.sizing.evidence import Figure, Kind
from twoends.sizing.tables import Entry, asset, check_keys, entries, nearest, read_toml

_MONEY = re.compile(r"\s*([0-9][0-9,_]*(?:\.[0-9]+)?)\s*([A-Za-z]{3})\s*")
_EXCHANGE = re.compile(r"\s*([A-Za-z]{3})\s*=\s*([0-9]+(?:\.[0-9]+)?)\s*")
YOURS = "as given on the command line"


@dataclass(frozen=True, slots=True, kw_only=True)
class Money:
    """An amount in one currency, and where it comes from."""

    amount: float
    currency: str
    kind: Kind = "reported"
    source: str = YOURS

    def figure(self) -> Figure:
        """For a report."""
        return Figure(value=self.amount, unit="money", kind=self.kind, source=self.source, of=self.currency)


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiPrice:
    """What an API asks per million tokens, in one currency."""

    model: str
    input: Money
    cached_input: Money
    output: Money


@dataclass(frozen=True, slots=True)
class PriceTable:
    """Exchange rates (per dollar), rents by what is rented, API prices by model."""

    per_usd: dict[str, Figure] = field(default_factory=dict)
    rents: dict[str, Money] = field(default_factory=dict)
    apis: dict[str, ApiPrice] = field(default_factory=dict)

    def convert(self, money: Money, currency: str) -> Money:
        """The same amount in another currency. Raises OptionError for one without an exchange rate."""
        if money.currency == currency:
            return money
        ours, theirs = self.rate(money.currency), self.rate(currency)
        source = f"{money.amount:,.10g} {money.currency} / {ours.value:g} x {theirs.value:g}"
        return Money(
            amount=money.amount / ours.value * theirs.value,
            currency=currency,
            kind="arithmetic",
            source=f"{source}; exchange: {(ours if theirs.value == 1 else theirs).source}",
        )

    def rate(self, currency: str) -> Figure:
        """How many to one dollar. Raises OptionError."""
        if currency not in self.per_usd:
            raise OptionError(
                f"no exchange rate for {currency} is known.",
                evidence=[("nearest known name", nearest(currency, list(self.per_usd)))],
                remedies=[
                    f"Say how many make a dollar:  --exchange {currency}=0.9",
                    "Or put it in --prices FILE",
                ],
            )
        return self.per_usd[currency]

    def add_exchange(self, word: str) -> None:
        """ "EUR=0.86": so many to one dollar. Raises OptionError."""
        match = _EXCHANGE.fullmatch(word)
        if match is None or float(match.group(2)) <= 0:
            raise OptionError(
                f"--exchange: '{word}' is not a rate above zero.", remedies=["Write:  EUR=0.86"]
            )
        rate = Figure(value=float(match.group(2)), unit="count", kind="reported", source=YOURS)
        self.per_usd[match.group(1).upper()] = rate


def parse_money(word: str) -> Money:
    """ "56.24USD", "1479084 VND". Raises OptionError."""
    match = _MONEY.fullmatch(word)
    if match is None:
        raise OptionError(f"'{word}' is not an amount of money.", remedies=["Write:  56.24USD, 1479084VND"])
    amount = float(match.group(1).replace(",", "").replace("_", ""))
    if amount <= 0:
        raise OptionError(f"'{word}' is not an amount above zero.")
    return Money(amount=amount, currency=match.group(2).upper())


def load_prices(extra: Path | None = None) -> PriceTable:
    """The table that comes along, and a user's. Raises OptionError for a file that is not as it should be."""
    table = PriceTable()
    for path in (asset("prices.toml"), *([] if extra is None else [extra])):
        tables = read_toml(path)
        check_keys(tables, ("currency", "rent", "api"), path=path)
        for entry in entries(tables, "currency", path=path):
            rate = Figure(value=entry.number("per_usd"), unit="count", kind="reported", source=entry.origin())
            table.per_usd[_code(entry, "code")] = rate
            entry.done()
        for entry in entries(tables, "rent", path=path):
            table.rents[entry.text("what")] = _money(entry, "price")
            entry.done()
        for entry in entries(tables, "api", path=path):
            model = entry.text("model")
            table.apis[model] = ApiPrice(
                model=model,
                input=_money(entry, "input"),
                cached_input=_money(entry, "cached_input"),
                output=_money(entry, "output"),
            )
            entry.done()
    return table


def _money(entry: Entry, key: str) -> Money:
    return Money(amount=entry.number(key), currency=_code(entry, "currency"), source=entry.origin())


def _code(entry: Entry, key: str) -> str:
    code = entry.text(key)
    if not re.fullmatch(r"[A-Z]{3}", code):
        raise entry.wrong(f"'{key}' must be three capital letters, not {code!r}")
    return code
