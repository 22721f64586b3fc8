"""Pieces of text joined are the decoding of all bytes, cut at the first stop; never half a character."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twoends.errors import OptionError, TokenizerError
from twoends.generate.stream import Piece, TextStream
from twoends.generate.tokenizer import Tokenizer

# Valid characters of 1 to 4 bytes, and every way to break UTF-8: lone tails, cut heads, overlong forms,
# surrogates, code points beyond the last.
CHUNKS = st.sampled_from(
    [
        *(c.encode() for c in ("a", "b", "\n", "é", "你", "😀", "👩‍👧", "\ufffd", "\u0301")),
        b"\x80",
        b"\xc3",
        b"\xe4\xbd",
        b"\xf0\x9f",
        b"\xf0\x9f\x98",
        b"\xc0\x80",
        b"\xe0\x80\x80",
        b"\xed\xa0\x80",
        b"\xf4\x90\x80\x80",
        b"\xf5",
        b"\xff",
    ]
)
BYTES = st.lists(CHUNKS, max_size=15).map(b"".join)


def stream(
    tokenizer: Tokenizer, *, stop_strings: tuple[str, ...] = (), show_specials: bool = False
) -> TextStream:
    return TextStream(
        tokenizer, stop_strings=stop_strings, stop_ids=tokenizer.stop_ids, show_specials=show_specials
    )


def pieces(out: TextStream, ids: list[int]) -> list[Piece]:
    given_out = []
    for token_id in ids:
        given_out.append(out.push(token_id))
        if given_out[-1].stopped:
            return given_out
    return [*given_out, out.finish()]


def joined(given_out: list[Piece]) -> str:
    return "".join(piece.text for piece in given_out)


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """One id for each byte."""
    by_byte = {tokenizer.token_bytes(token_id): token_id for token_id in range(256)}
    return [by_byte[data[at : at + 1]] for at in range(len(data))]


@given(data=BYTES)
@settings(deadline=None)
def test_single_bytes_joined_are_the_decoding_of_all(small: Tokenizer, data: bytes) -> None:
    assert joined(pieces(stream(small), byte_ids(small, data))) == data.decode("utf-8", "replace")


@given(ids=st.lists(st.integers(0, 269), max_size=30))
@settings(deadline=None)
def test_random_tokens_joined_are_the_decoding_of_all(small: Tokenizer, ids: list[int]) -> None:
    assert joined(pieces(stream(small), ids)) == small.decode_bytes(ids).decode("utf-8", "replace")


@given(ids=st.lists(st.integers(0, 163_583), max_size=30))
@settings(deadline=None)
def test_random_k3_tokens_joined_are_the_decoding_of_all(k3: Tokenizer, ids: list[int]) -> None:
    assert joined(pieces(stream(k3), ids)) == k3.decode_bytes(ids).decode("utf-8", "replace")


@given(text=st.text(max_size=30))
@settings(deadline=None)
def test_a_valid_text_is_never_broken(small: Tokenizer, text: str) -> None:
    given_out = pieces(stream(small), byte_ids(small, text.encode()))
    assert joined(given_out) == text
    assert given_out[-1].text == ""


def test_each_character_comes_with_its_last_byte(small: Tokenizer) -> None:
    out = stream(small)
    texts = [out.push(token_id).text for token_id in byte_ids(small, "é😀a".encode())]
    assert texts == ["", "é", "", "", "", "😀", "a"]


def test_an_emoji_split_over_k3_tokens_is_whole(k3: Tokenizer) -> None:
    text = "삼겹살 Việt 🌦"
    ids = k3.encode(text)
    assert any(k3.token_bytes(token_id).decode("utf-8", "ignore") == "" for token_id in ids)
    given_out = pieces(stream(k3), ids)
    assert joined(given_out) == text
    assert not any("\ufffd" in piece.text for piece in given_out)


def test_a_truncated_tail_appears_once_at_the_end(small: Tokenizer) -> None:
    out = stream(small)
    texts = [out.push(token_id).text for token_id in byte_ids(small, "a😀".encode()[:-1])]
    assert texts == ["a", "", "", ""]
    assert out.finish() == Piece(text="\ufffd")
    assert out.finish() == Piece(text="")


def test_a_stop_id_ends_the_text_and_gives_none_itself(small: Tokenizer) -> None:
    eos = small.special_id("[EOS]")
    out = stream(small, stop_strings=("abX",), show_specials=True)
    given_out = pieces(out, [*small.encode("the ab"), eos])
    assert joined(given_out) == "the ab"
    assert (given_out[-1].stopped, given_out[-1].stop) == ("stop_id", eos)


def test_an_ordinary_token_can_be_a_stop_id(small: Tokenizer) -> None:
    [fox] = small.encode(" fox")
    out = TextStream(small, stop_strings=(), stop_ids={fox})
    given_out = pieces(out, small.encode("the fox the"))
    assert (joined(given_out), given_out[-1].stop) == ("the", fox)


@pytest.mark.parametrize("text", ["The quick brown fox", "The quick brown foxes"])
def test_a_stop_string_across_tokens_is_cut_away(small: Tokenizer, text: str) -> None:
    ids = small.encode(text)
    assert b" fox" in [small.token_bytes(token_id) for token_id in ids]
    given_out = pieces(stream(small, stop_strings=("own fox",)), ids)
    assert joined(given_out) == "The quick br"
    assert (given_out[-1].stopped, given_out[-1].stop) == ("stop_string", "own fox")


def test_a_stop_string_inside_one_token_is_cut_away(small: Tokenizer) -> None:
    given_out = pieces(stream(small, stop_strings=("fo",)), small.encode("the fox"))
    assert joined(given_out) == "the "
    assert given_out[-1].stop == "fo"


def test_text_that_only_began_a_stop_string_comes_at_the_end(small: Tokenizer) -> None:
    out = stream(small, stop_strings=("the fox",))
    assert out.push(small.encode("the")[0]) == Piece(text="")
    assert out.finish() == Piece(text="the")


def test_a_stop_string_of_several_byte_characters_is_found(small: Tokenizer) -> None:
    given_out = pieces(stream(small, stop_strings=("好😀",)), byte_ids(small, "你好😀b".encode()))
    assert joined(given_out) == "你"


def test_a_broken_tail_can_complete_a_stop_string(small: Tokenizer) -> None:
    ids = byte_ids(small, b"ab\xf0\x9f")
    end = pieces(stream(small, stop_strings=("b\ufffd",)), [*ids, small.special_id("[EOS]")])
    assert joined(end) == "a"
    assert end[-1].stopped == "stop_string"


def test_special_tokens_are_hidden_and_split_no_character(small: Tokenizer) -> None:
    head, *tail = byte_ids(small, "é".encode())
    hidden = [small.special_id("<|open|>"), small.vocab_size - 1]
    assert joined(pieces(stream(small), [head, *hidden, *tail])) == "é"


def test_special_tokens_are_shown_on_request(small: Tokenizer) -> None:
    ids = [*small.encode("the"), small.special_id("<|open|>"), *small.encode(" fox")]
    assert joined(pieces(stream(small, show_specials=True), ids)) == "the<|open|> fox"


def test_an_id_outside_the_vocabulary_is_refused(small: Tokenizer) -> None:
    with pytest.raises(TokenizerError, match="Token id 280 is outside the vocabulary"):
        stream(small).push(280)


def test_an_empty_stop_string_is_refused(small: Tokenizer) -> None:
    with pytest.raises(OptionError, match="has no character"):
        stream(small, stop_strings=("",))


def test_a_stream_that_has_ended_takes_no_more(small: Tokenizer) -> None:
    out = stream(small)
    out.push(small.special_id("[EOS]"))
    with pytest.raises(AssertionError, match="has ended"):
        out.push(0)
    assert out.finish() == Piece(text="")
