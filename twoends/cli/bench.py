"""`twoends bench kernels`: how fast each kernel is, after its bits were checked."""

from __future__ import annotations

from twoends.cli.command import JSON, Argument, Command, Option, Values
from twoends.cli.options import THREADS
from twoends.cli.screen import Screen
from twoends.errors import OptionError

_SUBJECTS = ("kernels",)


def command() -> Command:
    """The description of `bench`."""
    return Command(
        name="bench",
        phrase="measure kernels",
        about=(
            "'bench kernels' checks every operation's bits, then prints its rate and the share of the "
            "measured memory bandwidth. No rate is printed where a bit is wrong (exit 4)."
        ),
        arguments=(Argument(name="WHAT", help="kernels", required=True),),
        options=(
            THREADS,
            Option(flag="--isa", value="X", help="instruction set, instead of the fastest"),
            JSON,
        ),
        examples=("twoends bench kernels --threads 1",),
        act=_act,
    )


def _act(values: Values, screen: Screen) -> None:
    if values.what not in _SUBJECTS:
        raise OptionError(f"'{values.what}' can't be measured.", evidence=[("known", ", ".join(_SUBJECTS))])
    from twoends.bench.kernels import bench_kernels

    bench_kernels(values, screen)
