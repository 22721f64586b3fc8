"""A small vocabulary made here, and the released one where the facts are beside the repository."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from twoends.generate.tokenizer import Tokenizer

SHARED_DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
K3_VOCAB_SIZE = 163_840

# The released order of the 256 single bytes: printable Latin-1 first, then the others.
PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
BYTE_ORDER = [*PRINTABLE, *sorted(set(range(256)) - set(PRINTABLE))]
# "ab" outranks "bc", so "abc" is ab|c; " fox" is whole although no merge leads to "own f"
MERGES = [
    "ab",
    "bc",
    "aa",
    "th",
    "the",
    " the",
    "ow",
    "own",
    " f",
    " fo",
    " fox",
    "你".encode(),
    "你好",
    "'s",
]
NAMED = {"[EOS]": True, "<|end_of_msg|>": True, "<|open|>": False, "[PAD]": True}


def small_ranks() -> list[bytes]:
    """Token bytes by rank: the single bytes, then MERGES."""
    merged = [token.encode() if isinstance(token, str) else token for token in MERGES]
    return [bytes([value]) for value in BYTE_ORDER] + merged


def rank_lines(tokens: list[bytes]) -> bytes:
    """A rank file in the released form."""
    return b"".join(
        base64.b64encode(token) + b" " + str(rank).encode() + b"\n" for rank, token in enumerate(tokens)
    )


def added_token(content: str, *, special: bool) -> dict[str, Any]:
    """One entry of added_tokens_decoder."""
    flags = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
    return {"content": content, "special": special, **flags}


def small_config(num_ranks: int, *, named: Mapping[str, bool]) -> dict[str, Any]:
    """A tokenizer_config.json whose named tokens follow the ranks directly."""
    return {
        "added_tokens_decoder": {
            str(num_ranks + at): added_token(name, special=special)
            for at, (name, special) in enumerate(named.items())
        },
        "additional_special_tokens": ["<|end_of_msg|>"],
        "clean_up_tokenization_spaces": False,
        "eos_token": "[EOS]",
        "extra_special_tokens": {},
        "model_max_length": 1000,
        "pad_token": "[PAD]",
        "tokenizer_class": "TikTokenTokenizer",
    }


@pytest.fixture
def small_dir(tmp_path: Path) -> Path:
    """A directory with the small vocabulary's two files; tests may damage them."""
    ranks = small_ranks()
    (tmp_path / "tiktoken.model").write_bytes(rank_lines(ranks))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(small_config(len(ranks), named=NAMED)))
    return tmp_path


@pytest.fixture
def rewrite_config(small_dir: Path) -> Callable[[Callable[[dict[str, Any]], object]], Path]:
    """Applies a change to the small vocabulary's tokenizer_config.json."""

    def rewrite(change: Callable[[dict[str, Any]], object]) -> Path:
        path = small_dir / "tokenizer_config.json"
        raw = json.loads(path.read_text())
        change(raw)
        path.write_text(json.dumps(raw))
        return small_dir

    return rewrite


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The small vocabulary: 270 ranks and 10 special slots, of which 4 are named."""
    directory = tmp_path_factory.mktemp("small")
    ranks = small_ranks()
    (directory / "tiktoken.model").write_bytes(rank_lines(ranks))
    (directory / "tokenizer_config.json").write_text(json.dumps(small_config(len(ranks), named=NAMED)))
    return Tokenizer.open(directory, vocab_size=len(ranks) + 10)


@pytest.fixture(scope="session")
def k3(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Kimi K3's own tokenizer."""
    sources = [
        SHARED_DATA / "tokenizer" / "tiktoken.model",
        SHARED_DATA / "kimi-k3" / "tokenizer_config.json",
    ]
    missing = [str(source) for source in sources if not source.is_file()]
    if missing:
        pytest.skip(f"the released tokenizer is not at {missing[0]}")
    directory = tmp_path_factory.mktemp("k3")
    for source in sources:
        shutil.copyfile(source, directory / source.name)
    return Tokenizer.open(directory, vocab_size=K3_VOCAB_SIZE)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The directory of released facts beside the repository."""
    if not SHARED_DATA.is_dir():
        pytest.skip(f"the released facts are not at {SHARED_DATA}")
    return SHARED_DATA
