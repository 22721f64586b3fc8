"""The table of commands, and the outermost edge: errors become messages and exit codes here.

Exit codes: 0 done; 1 failed; 2 asked wrongly; 3 does not fit; 4 not sound (errors.py).
"""

from __future__ import annotations

import errno
import importlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from twoends.cli.command import Command, help_text, nearest, parse, split_at_dashes
from twoends.cli.screen import Screen, columns
from twoends.errors import DoesNotFit, OptionError, TwoendsError

# verb -> what it does. Each verb is a module of this package whose `command()` describes it.
COMMANDS = {
    "run": "write text with a model, within a memory budget",
    "batch": "answer a file of requests, each weight read once for all",
    "eval": "measure how well a model foretells a text",
    "plan": "show how a budget would be used, before anything is read",
    "inspect": "check a checkpoint and list what is in it",
    "doctor": "check this machine: kernels, memory, disk",
    "size": "what a model needs, how fast it will be, what it costs",
    "tiny": "write a small synthetic checkpoint to try things on",
    "pack": "store the trunk in two thirds of its bytes, lossless",
    "bench": "measure kernels, cache policies, memory budgets",
    "train": "train a model and export it",
}
# Environment variables that mean something; any other TWOENDS_ name is an error.
ENVIRONMENT = ("TWOENDS_ISA",)

# Commands that say in their own place which kernels run.
_TELL_OF_KERNELS = ("run", "batch", "doctor")
# Packages that only some commands need, and the extra that installs them.
_EXTRAS = {"torch": "train", "safetensors": "train", "tokenizers": "train"}

# Reader threads only wait and copy; the usual 8 MB of stack each is address space under RLIMIT_DATA.
_STACK_BYTES = 256 * 1024
# BLAS computes nothing here, but its threads and buffers would count against --ram.
_ONE_THREAD = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


def main() -> int:
    """Entry of the console script: sets the process up, runs one command, gives its exit code."""
    for name in _ONE_THREAD:
        os.environ[name] = "1"
    threading.stack_size(_STACK_BYTES)
    signal.signal(signal.SIGTERM, _terminated)
    for stream in (sys.stdout, sys.stderr):
        # Text is UTF-8 wherever it goes; a terminal of another kind shows marks, never a traceback.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8", errors="replace")
    code = call(sys.argv[1:], environment=os.environ)
    _close_quietly()
    return code


def call(words: Sequence[str], *, environment: Mapping[str, str]) -> int:
    """Runs the command that `words` ask for; every error ends here as a message and a code."""
    options, literal = split_at_dashes(words)
    debug = "--debug" in options
    shown = [word for word in options if word != "--debug"]
    if literal:
        shown += ["--", *literal]
    try:
        return _call(shown, Screen.of_process(), environment, debug=debug)
    except BrokenPipeError:
        # Nobody reads what we write any more; a message would go nowhere either.
        return 1


def load_command(verb: str) -> Command:
    """The description of a verb. Raises OptionError with the nearest one."""
    if verb not in COMMANDS:
        raise OptionError(
            f"there is no command '{verb}'.",
            evidence=[("nearest known name", nearest(verb, list(COMMANDS)))],
            remedies=["See all commands:  twoends"],
        )
    command: Command = importlib.import_module(f"twoends.cli.{verb}").command()
    return command


def check_environment(environment: Mapping[str, str]) -> None:
    """Raises OptionError for a TWOENDS_ variable that means nothing: a misspelt one would be ignored."""
    for name in sorted(environment):
        if name.startswith("TWOENDS_") and name not in ENVIRONMENT:
            raise OptionError(
                f"the environment variable {name} means nothing to twoends.",
                evidence=[("nearest known name", nearest(name, ENVIRONMENT))],
                remedies=[f"Remove it:  unset {name}"],
            )


def overview() -> str:
    """What `twoends` alone prints: the verbs, and two commands to paste."""
    lines = ["usage: twoends COMMAND [options]", "", "commands:"]
    lines += columns(list(COMMANDS.items()))
    lines += [
        "",
        "Try it with the checkpoint that comes along, then look at the machine:",
        "",
        '  twoends run "Once upon a time"',
        "  twoends doctor",
        "",
        "Help for one command:  twoends COMMAND --help",
    ]
    return "\n".join(lines)


def _call(words: list[str], screen: Screen, environment: Mapping[str, str], *, debug: bool) -> int:
    try:
        check_environment(environment)
        _dispatch(words, screen)
    except TwoendsError as error:
        return _report(error, screen, debug=debug)
    except KeyboardInterrupt:
        screen.alert("twoends: stopped; nothing half written was left.")
        return 1
    except BrokenPipeError:
        raise
    except (MemoryError, OSError) as error:
        if isinstance(error, OSError) and error.errno != errno.ENOMEM:
            return _defect(error, screen, debug=debug)
        return _report(_refused_memory(), screen, debug=debug)
    except Exception as error:
        return _defect(error, screen, debug=debug)
    return 0


def _dispatch(words: list[str], screen: Screen) -> None:
    if not words or words[0] in ("--help", "-h", "help"):
        screen.line(overview())
        return
    if words[0] == "--version":
        from twoends import __version__

        screen.line(f"twoends {__version__}")
        return
    if words[0].startswith("-"):
        raise OptionError(
            f"the first word must be a command; there is no option {words[0]} here.",
            evidence=[("nearest known name", nearest(words[0], ["--help", "--version", "--debug"]))],
            remedies=["See all commands:  twoends"],
        )
    verb, *rest = words
    try:
        command = load_command(verb)
        if {"--help", "-h"} & set(split_at_dashes(rest)[0]):
            screen.line(help_text(command))
            return
        values = parse(command, rest)
        heard = screen.silent() if getattr(values, "json", False) else screen
        _warn_of_slow_kernels(verb, heard)
        command.act(values, heard)
    except ModuleNotFoundError as error:
        if error.name not in _EXTRAS:
            raise
        extra = f"pip install 'twoends[{_EXTRAS[error.name]}]'"
        raise TwoendsError(
            f"'twoends {verb}' needs {error.name}, which is not installed.",
            remedies=[f"Install it:  {extra}"],
        ) from None


def _warn_of_slow_kernels(verb: str, screen: Screen) -> None:
    """After an install without a compiler every command says so, and how to get the fast kernels."""
    from twoends.kernels.built import HOW_TO_GET_THE_FAST_ONES, is_built

    if verb not in _TELL_OF_KERNELS and not is_built():
        screen.note("twoends: slow numpy kernels only, for want of a C++ compiler at install. Fast ones:")
        screen.note(f"  {HOW_TO_GET_THE_FAST_ONES}")


def _report(error: TwoendsError, screen: Screen, *, debug: bool) -> int:
    if debug:
        screen.alert(traceback.format_exc())
    screen.alert(f"{screen.paint('twoends:', 'red')} {error}")
    return error.exit_code


def _refused_memory() -> DoesNotFit:
    """The system gave less than the budget: a limit on the process, or nothing is left."""
    import resource

    rows = [
        (name, f"{soft:,} bytes")
        for name, number in (("RLIMIT_AS", resource.RLIMIT_AS), ("RLIMIT_DATA", resource.RLIMIT_DATA))
        if (soft := resource.getrlimit(number)[0]) != resource.RLIM_INFINITY
    ]
    return DoesNotFit(
        "the system refused this process more memory.",
        evidence=rows or [("limits", "none on this process: the machine or its control group is full")],
        remedies=[
            "Lower --ram. Such limits also count memory that is reserved and never used,",
            "which is about 30 MB here.",
        ],
    )


def _defect(error: Exception, screen: Screen, *, debug: bool) -> int:
    """An exception that nobody foresaw: say so, and where."""
    if debug:
        screen.alert(traceback.format_exc())
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "twoends" in Path(frame.filename).parts] or frames
    place = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}, in {ours[-1].name}"
    text = TwoendsError(
        "this is a defect in twoends; the work was not finished.",
        evidence=[("type", type(error).__name__), ("says", str(error)), ("place", place)],
        remedies=["Run it again with --debug for the whole traceback, and report it with that."],
    )
    screen.alert(f"{screen.paint('twoends:', 'red')} {text}")
    return text.exit_code


def _terminated(signum: int, frame: object) -> NoReturn:
    """SIGTERM ends a command the way Ctrl-C does, so that temporary files are removed."""
    raise KeyboardInterrupt


def _close_quietly() -> None:
    """Flushes stdout now: at exit a closed pipe would print a warning of the interpreter's."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
