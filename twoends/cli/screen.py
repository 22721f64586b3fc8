"""Everything that is drawn: text on stdout, narration and the live line on stderr, bars and columns.

Colour only on a terminal and never the only signal; NO_COLOR turns it off. No line that we compose
is wider than 80 columns.
"""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
import time
from collections.abc import Sequence
from typing import TextIO

COLUMNS = 80
_BAR_CELLS = 10
_DRAW_EVERY_S = 0.1
# Text of a model may hold escape sequences; tab and line end are all that a terminal needs of them.
_HARMLESS = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)], "\ufffd")
_STYLES = {"bold": "1", "dim": "2", "red": "1;31", "green": "32", "yellow": "33"}

# The live line stands one row below the text. Index and reverse index (ESC D, ESC M) keep the column
# and scroll at the bottom of the screen, so the place of the text's cursor need not be known.
_MAKE_ROOM = "\x1bD\x1bM"
_DOWN = "\x1b7\x1bD\r\x1b[K"
_BACK = "\x1b8"


class Screen:
    """Where one command writes. `quiet` drops narration (with --json)."""

    def __init__(self, *, out: TextIO, err: TextIO, colour: bool, is_live: bool, quiet: bool = False) -> None:
        self.out, self.err = out, err
        self.colour, self.is_live, self.quiet = colour, is_live and not quiet, quiet
        self._live_shown = False
        self._drawn_at = 0.0
        self._text_on_terminal = out.isatty()
        self._ended_line = True

    @classmethod
    def of_process(cls, *, quiet: bool = False) -> Screen:
        """The process's own streams; live and coloured only where stderr is a terminal."""
        terminal = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        return cls(
            out=sys.stdout,
            err=sys.stderr,
            colour=terminal and not os.environ.get("NO_COLOR"),
            is_live=terminal,
            quiet=quiet,
        )

    def silent(self) -> Screen:
        """The same streams without narration."""
        return Screen(out=self.out, err=self.err, colour=False, is_live=False, quiet=True)

    def text(self, text: str) -> None:
        """A piece of the result, at once. A terminal gets control characters as U+FFFD, not to obey them."""
        if text:
            self.clear_live()
            self.out.write(text.translate(_HARMLESS) if self._text_on_terminal else text)
            self.out.flush()
            self._ended_line = text.endswith("\n")

    def line(self, text: str = "") -> None:
        """A whole line of the result."""
        self.text(text + "\n")

    def end_text(self) -> None:
        """Ends the line of the result, if one was begun."""
        if not self._ended_line:
            self.text("\n")

    def note(self, text: str = "") -> None:
        """A line of narration; on a terminal it begins on a line of its own."""
        if self.quiet:
            return
        self.alert(text)

    def alert(self, text: str) -> None:
        """A line on stderr that is shown even when quiet: errors, and what a signal does."""
        self.clear_live()
        begin = "\n" if self._text_on_terminal and self.err.isatty() and not self._ended_line else ""
        self._ended_line = self._ended_line or bool(begin)
        self.err.write(f"{begin}{text}\n")
        self.err.flush()

    def alert_from_signal(self, text: str) -> None:
        """The same in a signal handler: past the stream's buffer, which may be in the midst of a write."""
        clear = f"{_DOWN}{_BACK}" if self._live_shown else ""
        begin = "\n" if self._text_on_terminal and self.err.isatty() and not self._ended_line else ""
        end = "\x1b[K" if self.is_live else ""
        os.write(self.err.fileno(), f"{clear}{begin}{text}{end}\n".encode())
        self._live_shown, self._ended_line = False, self._ended_line or bool(begin)

    def live(self, text: str) -> None:
        """Draws the live line, in place of the one before; ten times a second at most."""
        now = time.monotonic()
        if self.is_live and now - self._drawn_at >= _DRAW_EVERY_S:
            self._drawn_at = now
            width = shutil.get_terminal_size((COLUMNS, 24)).columns - 1
            shown = self.paint(text[:width], "dim")
            # Set first: a signal may come while the line is being written.
            self._live_shown = True
            self.err.write(f"{_MAKE_ROOM}{_DOWN}{shown}{_BACK}")
            self.err.flush()

    def clear_live(self) -> None:
        """Takes the live line away."""
        if self._live_shown:
            self.err.write(f"{_DOWN}{_BACK}")
            self.err.flush()
            self._live_shown = False

    def paint(self, text: str, style: str) -> str:
        """`text` in a style where there is colour."""
        return f"\x1b[{_STYLES[style]}m{text}\x1b[0m" if self.colour else text


def bar(share: float, cells: int = _BAR_CELLS) -> str:
    """ "####" in a field of `cells`: a part of a whole; anything above zero shows at least one mark."""
    filled = round(min(max(share, 0.0), 1.0) * cells)
    return "#" * max(filled, 1 if share > 0.005 else 0)


def progress_bar(share: float, cells: int = 20) -> str:
    """ "[######......]"."""
    filled = int(min(max(share, 0.0), 1.0) * cells)
    return "[" + "#" * filled + "." * (cells - filled) + "]"


def columns(rows: Sequence[Sequence[str]], *, right: Sequence[int] = (), indent: int = 2) -> list[str]:
    """Rows with their columns aligned, those numbered in `right` to the right, two spaces between."""
    count = max((len(row) for row in rows), default=0)
    widths = [max((len(row[i]) for row in rows if i < len(row)), default=0) for i in range(count)]
    lines = []
    for row in rows:
        cells = [c.rjust(widths[i]) if i in right else c.ljust(widths[i]) for i, c in enumerate(row)]
        lines.append((" " * indent + "  ".join(cells)).rstrip())
    return lines


def facts(rows: Sequence[tuple[str, str]]) -> list[str]:
    """Names and texts in two columns, wrapped; what follows two spaces is a command, kept whole below."""
    width = max(len(name) for name, _ in rows)
    lines = []
    for name, text in rows:
        words, _, to_paste = text.partition("  ")
        wrapped = textwrap.wrap(words, COLUMNS - width - 5, break_long_words=False, break_on_hyphens=False)
        for i, part in enumerate(wrapped):
            lines.append(f"  {name if i == 0 else '':<{width}}   {part}")
        if to_paste:
            lines.append(f"    {to_paste.strip()}")
    return lines


def plural(count: int, noun: str) -> str:
    """ "1 token", "1,200 tokens"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def share_text(part: float, whole: float) -> str:
    """ "87 %"; "0.4 %" below one."""
    percent = 100 * part / whole if whole else 0.0
    return f"{percent:.0f} %" if percent >= 9.95 or percent == 0 else f"{percent:.1f} %"
