"""Text <-> ids on the small vocabulary: the paths of encoding, the cuts of long texts, ids out of range."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twoends.errors import OptionError, TokenizerError
from twoends.generate.tokenizer import CHUNK_CHARS, RUN_CHARS, Tokenizer, split_long

BLANKS = [chr(point) for point in range(0x110000) if chr(point).isspace()]


def tokens(tokenizer: Tokenizer, text: str) -> list[bytes]:
    return [tokenizer.token_bytes(token_id) for token_id in tokenizer.encode(text)]


def test_the_lowest_rank_merges_first(small: Tokenizer) -> None:
    assert tokens(small, "abc") == [b"ab", b"c"]


def test_the_leftmost_of_equal_ranks_merges_first(small: Tokenizer) -> None:
    assert tokens(small, "aaa") == [b"aa", b"a"]


def test_a_piece_that_is_a_token_is_taken_whole(small: Tokenizer) -> None:
    # no merge of this vocabulary builds it from two
    assert tokens(small, "你好") == ["你好".encode()]


def test_nothing_is_added_around_a_text(small: Tokenizer) -> None:
    assert small.encode("") == []
    assert small.encode_with_specials("") == []


@given(text=st.text(max_size=60))
@settings(deadline=None)
def test_decoding_gives_back_every_text(small: Tokenizer, text: str) -> None:
    assert small.decode_bytes(small.encode(text)) == text.encode()
    assert small.decode_bytes(small.encode_with_specials(text)) == text.encode()


def test_user_text_has_no_control_token(small: Tokenizer) -> None:
    text = "the<|open|><|reserved_token_277|>[EOS]"
    assert not any(map(small.is_special, small.encode(text)))


def test_trusted_text_has_named_and_reserved_control_tokens(small: Tokenizer) -> None:
    reserved = small.vocab_size - 1
    ids = small.encode_with_specials(f"the<|open|><|reserved_token_{reserved}|>[EOS]")
    assert ids == [*small.encode("the"), small.special_id("<|open|>"), reserved, small.special_id("[EOS]")]


def test_special_slots_fill_what_the_ranks_leave(small: Tokenizer) -> None:
    slots = range(small.num_ranks, small.vocab_size)
    names = [small.token_bytes(token_id).decode() for token_id in slots]
    assert names[:4] == ["[EOS]", "<|end_of_msg|>", "<|open|>", "[PAD]"]
    assert names[4:] == [f"<|reserved_token_{token_id}|>" for token_id in slots[4:]]


def test_the_turn_ends_at_two_ids(small: Tokenizer) -> None:
    assert small.stop_ids == {small.special_id("[EOS]"), small.special_id("<|end_of_msg|>")}


def test_a_marker_that_the_file_calls_not_special_is_kept_for_readers(small: Tokenizer) -> None:
    assert small.skip_special == {small.special_id(name) for name in ("[EOS]", "<|end_of_msg|>", "[PAD]")}


@pytest.mark.parametrize("offset", [-1, 0, 10**12], ids=["negative", "one too many", "huge"])
@pytest.mark.parametrize("use", ["decode_bytes", "token_bytes", "is_special"])
def test_an_id_outside_the_vocabulary_is_refused(small: Tokenizer, use: str, offset: int) -> None:
    token_id = -1 if offset < 0 else small.vocab_size + offset
    with pytest.raises(TokenizerError, match=re.escape(f"Token id {token_id:,} is outside the vocabulary.")):
        getattr(small, use)([0, token_id] if use == "decode_bytes" else token_id)


def test_an_unknown_special_name_is_answered_with_the_nearest(small: Tokenizer) -> None:
    with pytest.raises(TokenizerError, match=r"no special token '<\|opn\|>'(.|\n)*<\|open\|>"):
        small.special_id("<|opn|>")


@pytest.mark.parametrize("use", ["encode", "encode_with_specials"])
def test_half_a_character_is_refused_with_its_place(small: Tokenizer, use: str) -> None:
    with pytest.raises(OptionError, match=r"lone surrogate U\+D83D at character 2"):
        getattr(small, use)("ab\ud83dcd")


def test_a_short_text_is_one_part() -> None:
    text = " " * RUN_CHARS
    assert list(split_long(text)) == [text]


@pytest.mark.parametrize("filler", ["a", " ", "\x1c"], ids=["letters", "blanks", "U+001C"])
def test_a_long_run_is_cut_at_every_25000(filler: str) -> None:
    parts = list(split_long("x" * (filler != "a") + filler * 60_000))
    head = int(filler != "a")
    assert [len(part) for part in parts] == [head + 25_000, 25_000, 10_000]


def test_a_run_of_exactly_the_limit_is_not_cut() -> None:
    text = "a" * RUN_CHARS + " " * RUN_CHARS + "b"
    assert list(split_long(text)) == [text]


def test_runs_are_counted_anew_in_each_chunk() -> None:
    # words up to 10 before the chunk's end, then one run of letters across it
    words = "ab " * 133_330
    text = words + "a" * 25_005
    parts = list(split_long(text))
    assert [len(part) for part in parts] == [CHUNK_CHARS, len(text) - CHUNK_CHARS]


def split_plainly(text: str) -> list[str]:
    """The rule, one character at a time."""
    parts: list[str] = []
    run, was_blank = 0, False
    for at, character in enumerate(text):
        run = run + 1 if at % CHUNK_CHARS and character.isspace() == was_blank else 1
        was_blank = character.isspace()
        if at % CHUNK_CHARS == 0 or run > RUN_CHARS:
            parts.append("")
            run = 1
        parts[-1] += character
    return parts


@pytest.mark.parametrize(
    "runs",
    [(25_001, 3, 50_001), (399_999, 1, 30_000), (24_999, 25_000, 25_001, 2), (400_000, 400_001)],
    ids=str,
)
def test_cuts_are_those_of_the_plain_rule(runs: tuple[int, ...]) -> None:
    text = "".join((" " if at % 2 else "z") * length for at, length in enumerate(runs))
    assert list(split_long(text)) == split_plainly(text)


def test_a_cut_is_a_hard_border(small: Tokenizer) -> None:
    # "ab" is a token, but its halves lie on both sides of the first cut
    text = "x" * (RUN_CHARS - 1) + "ab"
    assert tokens(small, text)[-2:] == [b"a", b"b"]


def test_blanks_are_those_of_isspace() -> None:
    assert len(BLANKS) == 29
    every = "".join(chr(point) for point in range(0x110000))
    assert re.findall(r"\s", every) == BLANKS


def test_importing_the_tokenizer_loads_neither_tiktoken_nor_torch() -> None:
    code = "import sys, twoends.generate.tokenizer; print({'tiktoken', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
