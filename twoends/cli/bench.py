"""`twoends bench`: how fast each kernel is, what a cache would have kept, what memory buys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from twoends.cli.command import JSON, Argument, Command, Option, Values, nearest, whole_number
from twoends.cli.options import THREADS, ids_of
from twoends.cli.screen import Screen
from twoends.errors import OptionError
from twoends.units import parse_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Subject:
    """What can be measured: whether it needs a second word, the options that are its own, what runs it."""

    needs: str | None
    options: frozenset[str]
    act: Callable[[Values, Screen], None]


def command() -> Command:
    """The description of `bench`."""
    return Command(
        name="bench",
        phrase="measure kernels, cache policies, memory budgets",
        about=(
            "'bench kernels' checks every operation's bits, then prints its rate and the share of the "
            "measured memory bandwidth. 'bench replay TRACE' asks every cache policy for the experts of a "
            "trace (run --trace) at several capacities; 'bench router TRACE' tells how even the load of "
            "experts is and how often a token's are the last one's. 'bench ladder MODEL' runs a model at "
            "several budgets whose limits the system enforces, and compares the ids; 'bench predict MODEL' "
            "first says how long a token will take on each, from doctor's figures. Exit 4 where a bit or an "
            "id differs."
        ),
        arguments=(
            Argument(name="WHAT", help="kernels, replay, router, ladder or predict", required=True),
            Argument(
                name="OBJECT", help="replay, router: a trace; ladder, predict: a checkpoint's directory"
            ),
        ),
        options=_options(),
        examples=(
            "twoends bench kernels --threads 1",
            "twoends bench replay trace.jsonl --capacities 1/4,1,2",
            "twoends bench router even.jsonl --also skewed.jsonl",
            "twoends bench ladder /data/mini --rungs 200MB,400MB,800MB",
        ),
        act=_act,
    )


def _options() -> tuple[Option, ...]:
    return (
        THREADS,
        Option(flag="--isa", value="X", help="kernels: instruction set, instead of the fastest"),
        *_replay_options(),
        *_ladder_options(),
        Option(
            flag="--plot", value="FILE", convert=Path, help="replay, ladder: a picture (.png, .svg, .pdf)"
        ),
        JSON,
    )


def _replay_options() -> tuple[Option, ...]:
    return (
        Option(
            flag="--capacities",
            value="1/4,1,2",
            convert=_capacities,
            help="replay: slots, in experts of one token (1/8 to 4)",
        ),
        Option(
            flag="--order",
            choices=("decode", "file"),
            default="decode",
            help="replay, router: of a trace of growing prompts, only what is new (default), or all",
        ),
        Option(flag="--also", value="TRACE", convert=Path, many=True, help="router: another trace beside it"),
        Option(
            flag="--model",
            value="DIR",
            convert=Path,
            help="replay: refuse the trace unless this checkpoint made it",
        ),
        Option(
            flag="--save-profile",
            value="FILE",
            convert=Path,
            help="replay: keep what slots were worth to --model, for plan and run (--profile)",
        ),
    )


def _ladder_options() -> tuple[Option, ...]:
    return (
        Option(
            flag="--rungs",
            value="200MB,1GB",
            convert=_sizes,
            help="ladder, predict: the budgets; two or more",
        ),
        Option(
            flag="--repeat",
            value="N",
            convert=whole_number(least=1),
            default=5,
            help="ladder, predict: runs a rung (5)",
        ),
        Option(
            flag="-n",
            value="N",
            convert=whole_number(least=2),
            default=16,
            help="ladder, predict: tokens (16)",
        ),
        Option(
            flag="--ids", value="1,2,3", convert=ids_of, help="ladder, predict: the prompt (1,2,3,4,5,6,7,8)"
        ),
        Option(
            flag="--cap",
            choices=("auto", "cgroup", "rlimit", "none"),
            default="auto",
            help="ladder, predict: what enforces the budgets; auto: a memory cgroup, else RLIMIT_DATA",
        ),
        Option(flag="--out", value="FILE", convert=Path, help="ladder: the result file (ladder.json)"),
    )


def _act(values: Values, screen: Screen) -> None:
    subjects = _subjects()
    if values.what not in subjects:
        raise OptionError(
            f"'{values.what}' can't be measured.",
            evidence=[("known", ", ".join(subjects))],
            remedies=[f"Perhaps:  twoends bench {nearest(values.what, list(subjects))}"],
        )
    subject = subjects[values.what]
    for key in values.given:
        if key not in subject.options | {"json"}:
            flag = f"-{key}" if len(key) == 1 else f"--{key}"
            raise OptionError(
                f"'bench {values.what}' has no use for {flag}.", remedies=["See:  twoends bench --help"]
            )
    if (values.object is None) != (subject.needs is None):
        wanted = subject.needs or "nothing after it"
        raise OptionError(f"'bench {values.what}' needs {wanted}.", remedies=["See:  twoends bench --help"])
    subject.act(values, screen)


def _subjects() -> dict[str, _Subject]:
    return {
        "kernels": _Subject(needs=None, options=frozenset({"threads", "isa"}), act=_kernels),
        "replay": _Subject(
            needs="a trace",
            options=frozenset({"capacities", "order", "model", "plot", "save_profile"}),
            act=_replay,
        ),
        "predict": _Subject(
            needs="a checkpoint's directory",
            options=frozenset({"threads", "rungs", "repeat", "n", "ids", "cap"}),
            act=_predict,
        ),
        "router": _Subject(needs="a trace", options=frozenset({"order", "also"}), act=_router),
        "ladder": _Subject(
            needs="a checkpoint's directory",
            options=frozenset({"threads", "rungs", "repeat", "n", "ids", "cap", "out", "plot"}),
            act=_ladder,
        ),
    }


def _kernels(values: Values, screen: Screen) -> None:
    from twoends.cli.bench_kernels import show_kernels

    show_kernels(values, screen)


def _replay(values: Values, screen: Screen) -> None:
    from twoends.cli.bench_replay import show_replay

    show_replay(values, screen)


def _router(values: Values, screen: Screen) -> None:
    from twoends.cli.bench_router import show_router

    show_router(values, screen)


def _ladder(values: Values, screen: Screen) -> None:
    from twoends.cli.bench_ladder import show_ladder

    show_ladder(values, screen)


def _predict(values: Values, screen: Screen) -> None:
    from twoends.cli.bench_predict import show_prediction

    show_prediction(values, screen)


def _capacities(word: str) -> list[float]:
    """ "1/4,1,2" as numbers above zero."""
    found = []
    for part in word.split(","):
        above, slash, below = part.partition("/")
        try:
            capacity = float(above) / float(below) if slash else float(above)
        except (ValueError, ZeroDivisionError):
            raise OptionError(f"'{part}' is not a number or a fraction.") from None
        if not 0 < capacity < 1e6:
            raise OptionError(f"'{part}' is not a capacity above zero.")
        found.append(capacity)
    return found


def _sizes(word: str) -> list[int]:
    """ "200MB,1GB" in bytes, smallest first."""
    return sorted({parse_bytes(part) for part in word.split(",")})
