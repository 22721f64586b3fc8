"""Every exception Twoends raises.

    TwoendsError                exit 1   the work failed
      OptionError               exit 2   an option, prompt or environment value is wrong
      ConfigError               exit 2   config.json misses or misstates a field
      CheckpointError           exit 2   a weight file is wrong, short or missing
      TokenizerError            exit 2   the tokenizer's files are wrong or lack a token
      SessionError              exit 2   a session file is damaged or belongs to another model
      ReadError                 exit 1   the disk failed to give bytes that are there
      DoesNotFit                exit 3   memory or disk is too small, said before any harm
      NotSound                  exit 4   the result would not be sound (a bit differs, a value is not finite)

The form of a message is fixed: the first line says what can't be done, with the two numbers
that clash and where; `evidence` are aligned name-value rows; `remedies` say what to do, as
commands that can be pasted. `str(error)` is the whole text without the program's name.
"""

from __future__ import annotations

from collections.abc import Sequence


class TwoendsError(Exception):
    """Base of all our errors.

    `headline` is one sentence; `evidence` are (name, value) or (name, value, remark) rows;
    `remedies` are plain lines, each a reason or something to do.
    """

    exit_code = 1

    def __init__(
        self,
        headline: str,
        *,
        evidence: Sequence[tuple[str, ...]] = (),
        remedies: Sequence[str] = (),
    ) -> None:
        super().__init__(headline)
        self.headline = headline
        self.evidence = tuple(evidence)
        self.remedies = tuple(remedies)

    def __str__(self) -> str:
        lines = [self.headline]
        if self.evidence:
            lines.append("")
            lines.extend(_aligned(self.evidence))
        if self.remedies:
            lines.append("")
            lines.extend(f"  {line}" for line in self.remedies)
        return "\n".join(lines)


class OptionError(TwoendsError):
    """An option, prompt or environment value is wrong."""

    exit_code = 2


class ConfigError(TwoendsError):
    """config.json misses a field, has an unknown one, or contradicts itself."""

    exit_code = 2


class CheckpointError(TwoendsError):
    """A weight file is wrong, short or missing."""

    exit_code = 2


class TokenizerError(TwoendsError):
    """The tokenizer's files are wrong, or lack what was asked for."""

    exit_code = 2


class SessionError(TwoendsError):
    """A session file is damaged or belongs to another model."""

    exit_code = 2


class ReadError(TwoendsError):
    """Bytes that the headers promise could not be read from the device."""

    exit_code = 1


class DoesNotFit(TwoendsError):
    """Memory or disk is too small; raised before anything is harmed."""

    exit_code = 3


class NotSound(TwoendsError):
    """A result could be given, but it would not be the right one."""

    exit_code = 4


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Rows as indented text, every column but the last padded to its widest entry."""
    widths = [
        max((len(row[i]) for row in rows if len(row) > i), default=0) for i in range(max(map(len, rows)))
    ]
    return [
        "    " + "   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip()
        for row in rows
    ]
