"""Text <-> ids: byte-pair encoding from the checkpoint's own rank file, with K3's rule for pre-tokens.

The merging is tiktoken's. The rule and the two cuts of long texts are from spec kimi-k3, section 8.4.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NoReturn, Protocol

from twoends.errors import OptionError, TokenizerError
from twoends.generate.tokenizer_files import (
    CONFIG_FILE,
    RANK_FILE,
    Specials,
    fault,
    read_ranks,
    read_specials,
)

CHUNK_CHARS = 400_000
RUN_CHARS = 25_000

# Names that end a turn in the released formats: Kimi K3, Kimi-Linear.
_END_OF_TURN = ("<|end_of_msg|>", "<|im_end|>")

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
# The first alternative that matches wins. tiktoken's engine has class intersection and look-ahead.
PRETOKEN_PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        f"{_LEAD}{_UPPER}*{_LOWER}+{_CONTRACTION}",
        f"{_LEAD}{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)


class _Bpe(Protocol):
    """What is used of tiktoken's compiled core."""

    def encode_ordinary(self, text: str) -> list[int]: ...
    def encode(self, text: str, allowed_special: set[str]) -> list[int]: ...
    def decode_bytes(self, tokens: list[int]) -> bytes: ...
    def decode_single_token_bytes(self, token: int) -> bytes: ...


class Tokenizer:
    """The vocabulary of one checkpoint: `num_ranks` byte strings, then special slots up to `vocab_size`.

    stop_ids      ids that end a turn: <|end_of_msg|> (or <|im_end|>) and the file's eos_token
    skip_special  ids that text for a reader leaves out: those the file calls special. <|open|>,
                  <|close|> and <|sep|> are not among them, nor are the reserved slots.
    """

    def __init__(self, bpe: _Bpe, *, specials: Specials, num_ranks: int, vocab_size: int) -> None:
        self._bpe = bpe
        self._special_ids = specials.ids
        self.num_ranks = num_ranks
        self.vocab_size = vocab_size
        self.skip_special = specials.skipped
        ends = [specials.ids[name] for name in _END_OF_TURN if name in specials.ids]
        self.stop_ids = frozenset([*ends, specials.eos_id])

    @classmethod
    def open(cls, model_dir: Path, *, vocab_size: int) -> Tokenizer:
        """The tokenizer of the checkpoint in `model_dir`, whose config.json states `vocab_size`.

        Raises TokenizerError naming the file, what was expected and what was found.
        """
        # Loaded here: `import twoends` stays cheap, and ids alone need no tokenizer.
        # The compiled core, not tiktoken.Encoding, which would keep a second copy of the ranks (16 MB).
        from tiktoken._tiktoken import CoreBPE  # type: ignore[import-not-found, unused-ignore]

        model_dir = Path(model_dir)
        ranks = read_ranks(model_dir / RANK_FILE)
        num_ranks = len(ranks)
        if vocab_size < num_ranks:
            raise fault(
                f"{RANK_FILE} has more tokens than the model.",
                path=model_dir / RANK_FILE,
                expected=f"at most vocab_size {vocab_size:,} ranks",
                found=f"{num_ranks:,} ranks",
            )
        specials = read_specials(model_dir / CONFIG_FILE, num_ranks=num_ranks, vocab_size=vocab_size)
        bpe = CoreBPE(ranks, specials.ids, PRETOKEN_PATTERN)
        return cls(bpe, specials=specials, num_ranks=num_ranks, vocab_size=vocab_size)

    def encode(self, text: str) -> list[int]:
        """Ids of a user's text: all below `num_ranks`, so it can never hold a control token.

        Adds nothing (no [BOS]). Raises OptionError for a text with lone surrogates.
        """
        _check_text(text)
        return [token_id for part in split_long(text) for token_id in self._bpe.encode_ordinary(part)]

    def encode_with_specials(self, text: str) -> list[int]:
        """Ids of a trusted text in which every special token's name, reserved ones too, is that token.

        Only for text that the program wrote itself. Raises OptionError for lone surrogates.
        """
        _check_text(text)
        names = set(self._special_ids)
        return [token_id for part in split_long(text) for token_id in self._bpe.encode(part, names)]

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes of all ids in order, a special token as its name; not always whole UTF-8.

        Raises TokenizerError for an id outside the vocabulary.
        """
        ids = list(ids)
        for token_id in ids:
            self._check_id(token_id)
        return self._bpe.decode_bytes(ids)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one id, a special token as its name. Raises TokenizerError."""
        self._check_id(token_id)
        return self._bpe.decode_single_token_bytes(token_id)

    def is_special(self, token_id: int) -> bool:
        """Whether the id is a special slot (named or reserved), not a rank. Raises TokenizerError."""
        self._check_id(token_id)
        return token_id >= self.num_ranks

    def special_id(self, name: str) -> int:
        """The id of a special token by its name. Raises TokenizerError with the nearest name."""
        if name in self._special_ids:
            return self._special_ids[name]
        near = difflib.get_close_matches(name, self._special_ids, n=1, cutoff=0.0)
        raise TokenizerError(
            f"This tokenizer has no special token {name!r}.",
            evidence=[("special tokens", f"{len(self._special_ids):,}"), ("nearest name", *near)],
        )

    def _check_id(self, token_id: int) -> None:
        if not 0 <= token_id < self.vocab_size:
            raise TokenizerError(
                f"Token id {token_id:,} is outside the vocabulary.",
                evidence=[("expected", f"0 to {self.vocab_size - 1:,}"), ("found", f"{token_id:,}")],
            )


def split_long(text: str) -> Iterator[str]:
    """The text in parts that are encoded apart: what the released tokenizer does to long texts.

    A part ends every 400,000 code points, and inside such a chunk after every 25,000 of a run of
    white space or of anything else (as str.isspace() tells them apart).
    """
    for start in range(0, len(text), CHUNK_CHARS):
        chunk = text[start : start + CHUNK_CHARS]
        if len(chunk) <= RUN_CHARS:
            yield chunk
        else:
            yield from _split_runs(chunk)


def _split_runs(chunk: str) -> Iterator[str]:
    part_start = 0
    # re's \s is str.isspace() for str patterns; a test compares them on every code point
    for run in re.finditer(r"\s+|\S+", chunk):
        for cut in range(run.start() + RUN_CHARS, run.end(), RUN_CHARS):
            yield chunk[part_start:cut]
            part_start = cut
    yield chunk[part_start:]


def _check_text(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        _refuse_surrogate(text, error.start)


def _refuse_surrogate(text: str, at: int) -> NoReturn:
    raise OptionError(
        f"The text has a lone surrogate U+{ord(text[at]):04X} at character {at:,}, which has no bytes.",
        remedies=["Half of a character was cut off where the text was made; send valid UTF-8."],
    )
