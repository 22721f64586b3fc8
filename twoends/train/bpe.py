"""Train a byte-level BPE vocabulary in the released form: a tiktoken rank file and a tokenizer_config.json.

The merges come from the `tokenizers` library, cut by K3's own pre-tokeniser; the specials sit behind the
ranks at the places the release gives them.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tiktoken
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from twoends.checkpoint import tiny_vocab
from twoends.checkpoint.presets import NUM_SPECIALS

_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
K3_PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
# Offset behind the last rank -> content, and whether decoding drops it, as in the release.
SPECIALS = {place: (content, special) for content, place, special in tiny_vocab.SPECIALS}


def byte_order() -> list[bytes]:
    """The 256 single bytes in the order of the release: printable ones first, then the rest."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return [bytes([b]) for b in [*printable, *(b for b in range(256) if b not in printable)]]


def train_ranks(texts: Iterable[str], *, num_ranks: int, max_token_chars: int = 16) -> list[bytes]:
    """Tokens in rank order: 256 bytes, then merges in the order they were learnt."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(K3_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=num_ranks,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=max_token_chars,
    )
    tokenizer.train_from_iterator(texts, trainer)
    letters = byte_order()
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    symbols = [chr(b) for b in printable] + [chr(256 + i) for i in range(256 - len(printable))]
    to_byte = dict(zip(symbols, letters, strict=True))
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    merged = [b"".join(to_byte[c] for c in token) for token, _ in vocabulary if len(token) > 1]
    return [*letters, *merged]


def encoding(ranks: list[bytes]) -> tiktoken.Encoding:
    """The tiktoken encoder of these ranks with the 256 special places behind them."""
    specials = {
        SPECIALS[i][0] if i in SPECIALS else f"<|reserved_token_{len(ranks) + i}|>": len(ranks) + i
        for i in range(NUM_SPECIALS)
    }
    table = {token: rank for rank, token in enumerate(ranks)}
    return tiktoken.Encoding("twoends", pat_str=K3_PATTERN, mergeable_ranks=table, special_tokens=specials)


def rank_file(ranks: list[bytes]) -> str:
    """Text of `tiktoken.model`: one `base64 rank` a line."""
    return "".join(f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(ranks))


def read_rank_file(path: Path) -> list[bytes]:
    """Tokens of a rank file in rank order."""
    pairs = (line.split() for line in path.read_text(encoding="ascii").splitlines())
    return [base64.b64decode(token) for token, _ in sorted(pairs, key=lambda pair: int(pair[1]))]


def tokenizer_config(num_ranks: int) -> dict[str, Any]:
    """`tokenizer_config.json` in the release's form, specials by absolute id."""
    return tiny_vocab.tokenizer_config(num_ranks + NUM_SPECIALS)


def tokenizer_files(ranks: list[bytes]) -> dict[str, str]:
    """Name and text of the two files that ship beside a checkpoint."""
    config = json.dumps(tokenizer_config(len(ranks)), indent=2)
    return {"tiktoken.model": rank_file(ranks), "tokenizer_config.json": config}
