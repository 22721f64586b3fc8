"""Writes docs/cli.md from the commands' own help; with --check says whether it is fresh (exit 1 if not)."""

from __future__ import annotations

import sys
from pathlib import Path

from twoends.cli.command import help_text
from twoends.cli.main import COMMANDS, ENVIRONMENT, load_command, overview

PAGE = Path(__file__).with_name("cli.md")
_INTRODUCTION = f"""\
# The command line

Made by `docs/make_cli.py` from the commands' own help (`make docs`); a test fails when it is stale.

Results go to stdout, narration to stderr. With `--json` stdout is one object and nothing else.
Exit codes: 0 done; 1 failed; 2 asked wrongly (option, config, file); 3 does not fit (memory, disk);
4 the result would not be sound. Errors have no traceback unless `--debug` is given.

Environment: `{"`, `".join(ENVIRONMENT)}` = avx512, avx2, neon or plain forces an instruction set of the
native kernels. Any other variable that begins with `TWOENDS_` is an error. `NO_COLOR` turns colour off.
`XDG_CACHE_HOME` says where indexes of large checkpoints and the rates of disks are kept."""


def page() -> str:
    """The whole text of docs/cli.md."""
    parts = [_INTRODUCTION, _block(overview())]
    for verb in COMMANDS:
        parts += [f"## twoends {verb}", _block(help_text(load_command(verb)))]
    return "\n\n".join(parts) + "\n"


def _block(text: str) -> str:
    return f"```\n{text}\n```"


if __name__ == "__main__":
    if "--check" in sys.argv[1:]:
        sys.exit(0 if PAGE.read_text() == page() else "docs/cli.md is stale; make it again:  make docs")
    PAGE.write_text(page())
