"""`twoends size`: what a model needs, how fast it will be and what it costs, from arithmetic alone."""

from __future__ import annotations

from pathlib import Path

from twoends.cli.command import JSON, Argument, Command, Option, Values, real_number, whole_number
from twoends.cli.screen import Screen
from twoends.sizing.money import parse_mix
from twoends.sizing.prices import parse_money
from twoends.units import parse_bytes, parse_rate


def command() -> Command:
    """The description of `size`."""
    return Command(
        name="size",
        phrase="what a model needs, how fast it will be, what it costs",
        about=(
            "Reckons from a config alone: parameters and bytes, what fits in which memory, bytes of a token "
            "over every link and which link is the wall, and the load at which a machine costs less than "
            "the API. Every figure says measured, arithmetic or reported, and whose. Nothing is fetched, no "
            "weight is read. Without a machine it is this one, with the figures that 'twoends doctor' kept."
        ),
        arguments=(Argument(name="MODEL", help="kimi-k3, kimi-linear, or a directory (kimi-k3)"),),
        options=(*_machine_options(), *_load_options(), *_money_options(), *_report_options()),
        examples=(
            "twoends size kimi-k3 --gpus 8xB300 --sequences 64",
            "twoends size --ram 64GB --disk 6GB/s --cores 16 --mem-bw 80GB/s",
            "twoends size --machine b300-8 --mix 3:7:1 --utilisation 0.4 --html k3.html",
        ),
        act=_act,
    )


def _machine_options() -> tuple[Option, ...]:
    return (
        Option(flag="--machine", value="NAME", help="a machine of the table; the other options change it"),
        Option(flag="--gpus", value="8xB300", help="so many accelerators of a kind"),
        Option(flag="--ram", value="SIZE", convert=parse_bytes, help="the host's memory, like 64GB"),
        Option(flag="--disk", value="RATE", convert=parse_rate, help="rate of its disk, like 6GB/s"),
        Option(flag="--cores", value="N", convert=whole_number(least=1), help="cores that multiply"),
        Option(flag="--mem-bw", value="RATE", convert=parse_rate, help="rate of its memory, like 80GB/s"),
        Option(flag="--machines", value="FILE", convert=Path, help="more machines, in TOML (docs/sizing.md)"),
        Option(
            flag="--experts-as",
            choices=("MXFP4", "FP8", "BF16"),
            help="format of routed experts on accelerators (what they multiply)",
        ),
    )


def _load_options() -> tuple[Option, ...]:
    return (
        Option(
            flag="--context",
            value="N",
            convert=whole_number(least=1),
            default=4096,
            help="tokens that each sequence has room for (4,096)",
        ),
        Option(
            flag="--sequences",
            value="N",
            convert=whole_number(least=1),
            default=1,
            help="independent sequences that share each pass (1)",
        ),
        Option(
            flag="--draft",
            value="K",
            convert=whole_number(least=0),
            default=0,
            help="drafts verified with each token (0); needs --acceptance",
        ),
        Option(
            flag="--acceptance", value="A", convert=real_number, help="chance that a draft is right, 0 to 1"
        ),
    )


def _money_options() -> tuple[Option, ...]:
    return (
        Option(
            flag="--rent", value="MONEY", convert=parse_money, help="an hour of the machine, like 56.24USD"
        ),
        Option(flag="--currency", value="XXX", help="currency to show the hour in (the API's)"),
        Option(
            flag="--exchange",
            value="EUR=0.86",
            many=True,
            help="so many of a currency make a dollar; may be given several times",
        ),
        Option(flag="--prices", value="FILE", convert=Path, help="more prices, in TOML (docs/sizing.md)"),
        Option(
            flag="--mix",
            value="I:C:O",
            convert=parse_mix,
            help="tokens of input, cached input and output, in proportion (0:0:1)",
        ),
        Option(
            flag="--utilisation",
            value="U",
            convert=real_number,
            default=1.0,
            help="share of the time in which there is work (1)",
        ),
        Option(flag="--tokens-per-s", value="N", convert=real_number, help="speed that your server measured"),
        Option(flag="--buy", value="MONEY", convert=parse_money, help="price of the machine, to own it"),
        Option(flag="--years", value="N", convert=real_number, help="with --buy: years until written off"),
        Option(flag="--energy", value="MONEY", convert=parse_money, help="with --buy: a kWh, like 0.12USD"),
        Option(
            flag="--watts",
            value="N",
            convert=real_number,
            help="with --buy: power (its accelerators' maximum)",
        ),
        Option(
            flag="--residual", value="R", convert=real_number, help="with --buy: share it still fetches (0)"
        ),
        Option(
            flag="--pue", value="P", convert=real_number, help="with --buy: building's factor on power (1)"
        ),
    )


def _report_options() -> tuple[Option, ...]:
    return (
        Option(flag="--example", help="only the worked example from a public article"),
        Option(flag="--html", value="FILE", convert=Path, help="also write a page of its own, with plots"),
        JSON,
    )


def _act(values: Values, screen: Screen) -> None:
    from twoends.cli.size_model import size

    size(values, screen)
