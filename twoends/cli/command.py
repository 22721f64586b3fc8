"""What a command is: a table of options. The table parses the words, writes the help and docs/cli.md.

argparse splits the words; conversion and every message are ours, so that neither depends on the
Python version (docs/decisions/0005).
"""

from __future__ import annotations

import argparse
import difflib
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from twoends.cli.screen import COLUMNS, Screen
from twoends.errors import OptionError

_HELP_AT = 26


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option. `value` is the word that stands for its value in the help; without one it is a switch.

    `convert` raises OptionError for a word that it can't take. `many` may be given several times.
    """

    flag: str
    help: str
    value: str = ""
    convert: Callable[[str], Any] = str
    choices: tuple[str, ...] = ()
    default: Any = None
    many: bool = False

    @property
    def key(self) -> str:
        """The name under which the value is found."""
        return self.flag.lstrip("-").replace("-", "_")

    @property
    def usage(self) -> str:
        """ "--ram SIZE"."""
        shown = "{" + ",".join(self.choices) + "}" if self.choices else self.value
        return f"{self.flag} {shown}".rstrip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """A word without a flag, in its place."""

    name: str
    help: str
    required: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One verb. `act` takes the values by key (arguments under their lower-case names) and the screen."""

    name: str
    phrase: str
    about: str
    act: Callable[[Values, Screen], None]
    arguments: tuple[Argument, ...] = ()
    options: tuple[Option, ...] = ()
    examples: tuple[str, ...] = ()


class Values:
    """The words of one call, converted; `given` are the options that the user wrote, with their words."""

    def __init__(self, values: dict[str, Any], given: dict[str, list[str]]) -> None:
        self._values = values
        self.given = given

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def __getattr__(self, key: str) -> Any:
        try:
            return self._values[key]
        except KeyError:
            raise AttributeError(key) from None


DEBUG = Option(flag="--debug", help="show a traceback when something fails")
JSON = Option(flag="--json", help="print one JSON object and nothing else")
HELP = Option(flag="--help", help="show this help")


def parse(command: Command, words: Sequence[str]) -> Values:
    """The values that `words` give. Raises OptionError with the nearest known name."""
    options = (*command.options, DEBUG)
    parser = _Parser(command)
    parser.add_argument("words", nargs="*", default=[])
    for option in options:
        if not option.value and not option.choices:
            parser.add_argument(option.flag, dest=option.key, action="store_true")
        else:
            action = "append" if option.many else "store"
            parser.add_argument(option.flag, dest=option.key, action=action)
    # Ours, because Python versions differ in what they do with "--" among mixed words.
    before, literal = split_at_dashes(words)
    found, unknown = parser.parse_known_intermixed_args(before)
    if unknown:
        raise _unknown(command, unknown[0])
    values = _arguments(command, [*found.words, *literal])
    given: dict[str, list[str]] = {}
    for option in options:
        raw = getattr(found, option.key)
        if raw is not None and raw is not False:
            given[option.key] = [] if raw is True else raw if option.many else [raw]
        values[option.key] = _value(option, raw)
    return Values(values, given)


def split_at_dashes(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words before the first "--", in which options count, and those after it."""
    at = list(words).index("--") if "--" in words else len(words)
    return list(words[:at]), list(words[at + 1 :])


def usage(command: Command) -> str:
    """The line that shows how the command is called."""
    arguments = [a.name if a.required else f"[{a.name}]" for a in command.arguments]
    return " ".join(["twoends", command.name, *arguments, "[options]"])


def help_text(command: Command) -> str:
    """What --help prints: at most 80 columns, the same on every terminal."""
    lines = [f"usage: {usage(command)}", "", *textwrap.wrap(command.about, COLUMNS)]
    if command.arguments:
        lines += ["", "arguments:"]
        for argument in command.arguments:
            lines += _entry(argument.name, argument.help)
    lines += ["", "options:"]
    for option in (*command.options, DEBUG, HELP):
        lines += _entry(option.usage, option.help)
    if command.examples:
        lines += ["", "examples:", *(f"  {example}" for example in command.examples)]
    return "\n".join(lines)


def nearest(word: str, known: Sequence[str]) -> str:
    """The known name that looks most like `word`."""
    return difflib.get_close_matches(word, known, n=1, cutoff=0.0)[0]


def whole_number(*, least: int) -> Callable[[str], int]:
    """A converter to int of at least `least`."""

    def convert(word: str) -> int:
        if not re.fullmatch(r"[+-]?[0-9][0-9_,]*", word):
            raise OptionError(f"'{word}' is not a whole number.")
        number = int(word.replace(",", "").replace("_", ""))
        if number < least:
            raise OptionError(f"{number:,} is too small; at least {least:,}.")
        return number

    return convert


def real_number(word: str) -> float:
    """A converter to float; ranges are checked where they are known."""
    try:
        return float(word)
    except ValueError:
        raise OptionError(f"'{word}' is not a number.") from None


class _Parser(argparse.ArgumentParser):
    def __init__(self, command: Command) -> None:
        super().__init__(prog=f"twoends {command.name}", add_help=False, allow_abbrev=False)
        self._command = command

    def error(self, message: str) -> NoReturn:
        flag = re.match(r"argument (\S+):", message)
        wanted = {option.flag: option for option in self._command.options}
        if flag is not None and flag.group(1) in wanted:
            option = wanted[flag.group(1)]
            if option.value or option.choices:
                raise OptionError(
                    f"{option.flag} needs a value:  {option.usage}", remedies=_see(self._command)
                )
            raise OptionError(f"{option.flag} takes no value.", remedies=_see(self._command))
        raise OptionError(f"{message}.", remedies=_see(self._command))


def _arguments(command: Command, words: list[str]) -> dict[str, Any]:
    if len(words) > len(command.arguments):
        extra = words[len(command.arguments)]
        raise OptionError(
            f"'{command.name}' does not know what to do with {extra!r}.",
            remedies=[f"Usage:  {usage(command)}", *_see(command)],
        )
    values: dict[str, Any] = {argument.name.lower(): None for argument in command.arguments}
    values.update(zip(_filled(command, len(words)), words, strict=True))
    for argument in command.arguments:
        if argument.required and values[argument.name.lower()] is None:
            raise OptionError(
                f"'{command.name}' needs {argument.name}: {argument.help}.",
                remedies=[f"Usage:  {usage(command)}", *_see(command)],
            )
    return values


def _filled(command: Command, num_words: int) -> list[str]:
    """The arguments that so many words are for: those that may be left out give way, the last ones first."""
    spare = num_words - sum(argument.required for argument in command.arguments)
    filled = []
    for argument in command.arguments:
        spare -= not argument.required
        if argument.required or spare >= 0:
            filled.append(argument.name.lower())
    return filled[:num_words]


def _value(option: Option, raw: Any) -> Any:
    if raw is None:
        return [] if option.many else option.default
    if raw is True or raw is False:
        return raw
    words = raw if option.many else [raw]
    converted = [_convert(option, word) for word in words]
    return converted if option.many else converted[0]


def _convert(option: Option, word: str) -> Any:
    if option.choices and word not in option.choices:
        raise OptionError(
            f"{option.flag} is '{word}'; it must be one of {', '.join(option.choices)}.",
            evidence=[("nearest known name", nearest(word, option.choices))],
        )
    try:
        return option.convert(word)
    except OptionError as error:
        headline = f"{option.flag}: {error.headline}"
        raise OptionError(headline, evidence=error.evidence, remedies=error.remedies) from None


def _unknown(command: Command, word: str) -> OptionError:
    flag = word.split("=", 1)[0]
    known = [option.flag for option in (*command.options, DEBUG, HELP)]
    return OptionError(
        f"'{command.name}' has no option {flag}.",
        evidence=[("nearest known name", nearest(flag, known))],
        remedies=[*_see(command), "A word that begins with - and is no option goes after --"],
    )


def _see(command: Command) -> list[str]:
    return [f"See all options:  twoends {command.name} --help"]


def _entry(left: str, text: str) -> list[str]:
    """One name and its help, the help in a column of its own."""
    wrapped = textwrap.wrap(text, COLUMNS - _HELP_AT)
    if len(left) > _HELP_AT - 4:
        return [f"  {left}", *(" " * _HELP_AT + line for line in wrapped)]
    first = f"  {left}".ljust(_HELP_AT) + wrapped[0]
    return [first, *(" " * _HELP_AT + line for line in wrapped[1:])]
