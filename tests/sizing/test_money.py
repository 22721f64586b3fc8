"""The worked example to the digit, and what money questions it leaves out."""

from __future__ import annotations

import pytest

from twoends.errors import OptionError
from twoends.sizing.evidence import reported
from twoends.sizing.example import worked_example
from twoends.sizing.money import (
    MIXES,
    OUTPUT_ONLY,
    Mix,
    Owning,
    break_even,
    needed_utilisation,
    owning_cost,
    parse_mix,
    sensitivity,
)
from twoends.sizing.prices import Money, parse_money

# The article's figures as it prints them.
STEPS = {
    "weights": "1,487.5 GB",
    "B300 for the weights": "5.16 B300",
    "so many by memory": "6 B300",
    "so many by whole nodes": "8 B300",
    "memory left over": "816.5 GB",
    "its share": "35.4 %",
    "rent of the node, an hour": "1,479,084 VND",
    "the same in dollars": "56.24 USD",
    "output, a million tokens": "15.00 USD",
    "break-even": "3.75 million tokens/h",
    "the same in seconds": "1,041 tokens/s",
    "64 accelerators": "8,332 tokens/s",
    "weights on Hopper": "2,800.0 GB",
    "nodes of 8 x H100": "5 nodes",
    "rent of each, an hour": "543,398 VND",
    "price against the first": "1.84 x",
}
LEFT_OUT = {
    "input, a million tokens": "3.00 USD",
    "cached input, a million": "0.30 USD",
    "busy half the time": "2,083 tokens/s",
    "the real checkpoint": "1,560.9 GB",
    "routed experts in it": "92.7 %",
    "on Hopper in truth": "2,837.1 GB",
}


@pytest.mark.parametrize("name", STEPS)
def test_the_worked_example_comes_out_exactly(machines, prices, name):
    steps = {step.name: step.figure.text for step in worked_example(machines, prices).steps}
    assert steps[name] == STEPS[name]


@pytest.mark.parametrize("name", LEFT_OUT)
def test_the_example_says_what_it_leaves_out(machines, prices, name):
    steps = {step.name: step.figure.text for step in worked_example(machines, prices).left_out}
    assert steps[name] == LEFT_OUT[name]


def test_the_example_by_hand(prices):
    even = break_even(Money(amount=1_479_084, currency="VND"), prices.apis["kimi-k3"], prices)
    assert even.hourly.amount == 1_479_084 / 26_300
    assert even.tokens_per_s.value == pytest.approx(1_479_084 / 26_300 / 15 * 1e6 / 3600, rel=1e-12)


def test_input_that_comes_along_lowers_the_break_even(prices):
    rent = Money(amount=56.24, currency="USD")
    api = prices.apis["kimi-k3"]
    plain, agents = (
        break_even(rent, api, prices, mix=mix)
        for mix in (OUTPUT_ONLY, Mix(input=3, cached_input=7, output=1))
    )
    # 3 x 3.00 + 7 x 0.30 + 15.00
    assert agents.value_per_million.value == pytest.approx(26.10)
    assert agents.tokens_per_s.value == pytest.approx(plain.tokens_per_s.value * 15 / 26.10)


def test_a_machine_that_rests_must_be_faster_while_it_works(prices):
    even = break_even(Money(amount=56.24, currency="USD"), prices.apis["kimi-k3"], prices, utilisation=0.4)
    assert even.busy_tokens_per_s.value == pytest.approx(even.tokens_per_s.value / 0.4)


@pytest.mark.parametrize("utilisation", [0.0, -0.5, 1.01, float("nan")])
def test_an_impossible_utilisation_is_refused(prices, utilisation):
    with pytest.raises(OptionError, match="--utilisation is"):
        break_even(Money(amount=1, currency="USD"), prices.apis["kimi-k3"], prices, utilisation=utilisation)


def test_the_utilisation_at_which_it_pays(prices):
    even = break_even(Money(amount=54, currency="USD"), prices.apis["kimi-k3"], prices)
    assert even.tokens_per_s.value == pytest.approx(1000)
    assert needed_utilisation(even, 4000).value == pytest.approx(0.25)
    assert needed_utilisation(even, 500).value == pytest.approx(2.0)


def test_sensitivity_is_linear_in_the_rent(prices):
    table = dict(
        sensitivity(Money(amount=56.24, currency="USD"), prices.apis["kimi-k3"], prices, utilisation=1)
    )
    halves = table[MIXES[0]]
    assert halves[0].tokens_per_s.value == pytest.approx(halves[-1].tokens_per_s.value / 4)


def test_owning_is_depreciation_and_power(prices):
    owning = Owning(
        price=parse_money("438000USD"),
        years=5,
        residual_share=0.0,
        watts=reported(10_000, "W", "a test"),
        overhead=1.2,
        energy=parse_money("0.10USD"),
    )
    cost = owning_cost(owning, prices, currency="USD")
    assert cost.depreciation.amount == pytest.approx(10.0)
    assert cost.power.amount == pytest.approx(1.2)
    assert cost.hourly.amount == pytest.approx(11.2)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [("years", 0.0, "--years is 0"), ("years", -1.0, "--years is -1"),
     ("residual_share", 1.0, "--residual is 1"), ("overhead", 0.5, "--pue is 0.5")],
)  # fmt: skip
def test_impossible_owning_is_refused(field, value, words):
    fields = {
        "price": parse_money("1USD"), "years": 4.0, "residual_share": 0.0, "overhead": 1.0,
        "watts": reported(1, "W", "a test"), "energy": parse_money("0.1USD"),
    }  # fmt: skip
    with pytest.raises(OptionError, match=words):
        Owning(**{**fields, field: value})


def test_any_currency_with_a_rate_can_be_used(prices):
    prices.add_exchange("EUR=0.8")
    assert prices.convert(parse_money("40EUR"), "USD").amount == pytest.approx(50)
    assert prices.convert(parse_money("40EUR"), "VND").amount == pytest.approx(50 * 26_300)


def test_an_unknown_currency_is_told_the_nearest_and_how_to_add_it(prices):
    with pytest.raises(OptionError, match=r"no exchange rate for VDN[\s\S]*VND[\s\S]*--exchange VDN="):
        prices.convert(parse_money("5VDN"), "USD")


@pytest.mark.parametrize("word", ["", "5", "USD", "-5USD", "0USD", "5 dollars", "1e3USD", "nanUSD"])
def test_what_is_no_amount_of_money_is_refused(word):
    with pytest.raises(OptionError, match="amount"):
        parse_money(word)


@pytest.mark.parametrize("word", ["EUR", "EUR=0", "EUR=-1", "EURO=1", "=1"])
def test_what_is_no_exchange_rate_is_refused(prices, word):
    with pytest.raises(OptionError, match="--exchange"):
        prices.add_exchange(word)


@pytest.mark.parametrize("word", ["", "1:2", "1:2:0", "-1:0:1", "a:b:c"])
def test_what_is_no_mix_is_refused(word):
    with pytest.raises(OptionError, match="mix"):
        parse_mix(word)
