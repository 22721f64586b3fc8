"""The rule for pre-tokens: its classes against Unicode's tables, whole texts against a second engine.

The second engine is the `regex` module, which tiktoken itself depends on; merging is redone below.
"""

from __future__ import annotations

import itertools
import unicodedata

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from tiktoken._tiktoken import CoreBPE

from twoends.generate.tokenizer import PRETOKEN_PATTERN, Tokenizer

SINGLE_BYTES = {bytes([value]): value for value in range(256)}
EVERY_CHARACTER = [chr(point) for point in range(0x110000) if not 0xD800 <= point < 0xE000]
# Unicode moved these from one category to another after the table that some Pythons have.
MOVED = {"\u0295"}
# What the rule tells apart: case classes, titlecase, modifiers, marks, Han in and out of the letters,
# digits of other scripts, contractions with a long s, every kind of blank, U+001C (blank for Python only).
ALPHABET = (
    "abXYéßǅʰªあ가你〇⺀々\u0301\u0903012٣Ⅷ½'sSſtTrReEvVmMlLdD/!?.-_$€😀"
    " \t\n\r\f\v\x1c\x85\xa0\u2003\u2028\u3000"
)


def matched(pattern: str) -> set[str]:
    """Every character that tiktoken's engine matches (its splitter drops what a pattern doesn't match)."""
    engine = CoreBPE(SINGLE_BYTES, {}, pattern)
    return set(engine.decode_bytes(engine.encode_ordinary("".join(EVERY_CHARACTER))).decode())


def in_categories(*categories: str) -> set[str]:
    return {c for c in EVERY_CHARACTER if unicodedata.category(c).startswith(categories)}


@pytest.fixture(scope="module")
def han() -> set[str]:
    return matched(r"\p{Han}")


def test_han_is_the_released_set(han: set[str]) -> None:
    assert len(han) == 99_030
    assert {"〇", "⺀", "々", "你"} <= han
    assert not han & set("あ가、")


@pytest.mark.parametrize(
    ("pattern", "categories"),
    [
        (r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]", ("Lu", "Lt", "Lm", "Lo", "M")),
        (r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]", ("Ll", "Lm", "Lo", "M")),
    ],
    ids=["upper", "lower"],
)
def test_a_case_class_is_its_categories_without_han(
    han: set[str], pattern: str, categories: tuple[str, ...]
) -> None:
    assert pattern in PRETOKEN_PATTERN
    assigned = set(EVERY_CHARACTER) - in_categories("Cn") - MOVED
    assert matched(pattern) & assigned == (in_categories(*categories) - han) & assigned


def merged(piece: bytes, ranks: dict[bytes, int]) -> list[int]:
    """Byte-pair encoding said plainly: the pair of lowest rank first, the leftmost of equals."""
    if piece in ranks:
        return [ranks[piece]]
    parts = [piece[i : i + 1] for i in range(len(piece))]
    while True:
        pairs = [
            (ranks[left + right], at)
            for at, (left, right) in enumerate(itertools.pairwise(parts))
            if left + right in ranks
        ]
        if not pairs:
            return [ranks[part] for part in parts]
        _, at = min(pairs)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def encoded_plainly(text: str, ranks: dict[bytes, int]) -> list[int]:
    pieces = regex.findall(PRETOKEN_PATTERN, text, flags=regex.V1)
    assert "".join(pieces) == text
    return [token_id for piece in pieces for token_id in merged(piece.encode(), ranks)]


def ranks_of(tokenizer: Tokenizer) -> dict[bytes, int]:
    return {tokenizer.token_bytes(token_id): token_id for token_id in range(tokenizer.num_ranks)}


@pytest.fixture(scope="module")
def small_vocabulary(small: Tokenizer) -> dict[bytes, int]:
    return ranks_of(small)


@pytest.fixture(scope="module")
def k3_vocabulary(k3: Tokenizer) -> dict[bytes, int]:
    return ranks_of(k3)


@given(text=st.text(alphabet=ALPHABET, max_size=40))
@settings(max_examples=300, deadline=None)
def test_encoding_is_the_rule_and_plain_merging_small(
    small: Tokenizer, small_vocabulary: dict[bytes, int], text: str
) -> None:
    assert small.encode(text) == encoded_plainly(text, small_vocabulary)


@given(text=st.text(alphabet=ALPHABET, max_size=40))
@settings(max_examples=500, deadline=None)
def test_encoding_is_the_rule_and_plain_merging_k3(
    k3: Tokenizer, k3_vocabulary: dict[bytes, int], text: str
) -> None:
    assert k3.encode(text) == encoded_plainly(text, k3_vocabulary)


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("don't", ["don't"]),
        ("DON'T you'LL", ["DON'T", " you'LL"]),
        ("it'ſ", ["it'ſ"]),
        ("HelloWorld", ["Hello", "World"]),
        ("12345", ["123", "45"]),
        ("a  b", ["a", " ", " b"]),
        ("a \n\n b", ["a", " \n\n", " b"]),
        ("x==\r\n/y", ["x", "==\r\n", "/y"]),
        ("end  ", ["end", "  "]),
        ("中a文", ["中", "a", "文"]),
        ("#中", ["#", "中"]),
        ("#a", ["#a"]),
    ],
)
def test_pieces_of_a_text(text: str, pieces: list[str]) -> None:
    assert regex.findall(PRETOKEN_PATTERN, text, flags=regex.V1) == pieces
