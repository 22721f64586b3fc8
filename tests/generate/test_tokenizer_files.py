"""Every way the two files can be wrong is refused with the file, what was expected and what was found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from twoends.errors import TokenizerError
from twoends.generate.tokenizer import Tokenizer

NUM_RANKS = 270
VOCAB_SIZE = 280
EOS, END = "270", "271"

Rewrite = Callable[[Callable[[dict[str, Any]], object]], Path]


def refusal(directory: Path, *, vocab_size: int = VOCAB_SIZE) -> str:
    with pytest.raises(TokenizerError) as caught:
        Tokenizer.open(directory, vocab_size=vocab_size)
    text = str(caught.value)
    assert "    file " in text
    assert str(directory) in text
    return text


def edit_lines(directory: Path, change: Callable[[list[bytes]], object]) -> Path:
    path = directory / "tiktoken.model"
    lines = path.read_bytes().splitlines(keepends=True)
    change(lines)
    path.write_bytes(b"".join(lines))
    return directory


def put(at: int, line: bytes) -> Callable[[list[bytes]], object]:
    return lambda lines: lines.__setitem__(at, line)


def test_sound_files_open(small_dir: Path) -> None:
    tokenizer = Tokenizer.open(small_dir, vocab_size=VOCAB_SIZE)
    assert (tokenizer.num_ranks, tokenizer.vocab_size) == (NUM_RANKS, VOCAB_SIZE)


def test_the_order_of_lines_and_the_last_newline_do_not_matter(small_dir: Path) -> None:
    expected = Tokenizer.open(small_dir, vocab_size=VOCAB_SIZE).encode("the fox's abc")
    path = small_dir / "tiktoken.model"
    path.write_bytes(b"\n".join(reversed(path.read_bytes().splitlines())))
    assert Tokenizer.open(small_dir, vocab_size=VOCAB_SIZE).encode("the fox's abc") == expected


@pytest.mark.parametrize("name", ["tiktoken.model", "tokenizer_config.json"])
def test_a_missing_file_is_named(small_dir: Path, name: str) -> None:
    (small_dir / name).unlink()
    assert f"There is no {name} in {small_dir}" in refusal(small_dir)


def test_a_rank_file_that_is_a_directory_is_refused(small_dir: Path) -> None:
    (small_dir / "tiktoken.model").unlink()
    (small_dir / "tiktoken.model").mkdir()
    assert "tiktoken.model can't be read" in refusal(small_dir)


def test_an_absurdly_large_rank_file_is_refused_unread(small_dir: Path) -> None:
    with (small_dir / "tiktoken.model").open("r+b") as file:
        file.truncate(1 << 40)
    assert "too large to be a rank file" in refusal(small_dir)


@pytest.mark.parametrize(
    ("line", "headline"),
    [
        (b"I!== 0\n", "Line 1 of tiktoken.model has a token that is not base64"),
        (b"IQ= 0\n", "Line 1 of tiktoken.model has a token that is not base64"),
        (b" 0\n", "Line 1 of tiktoken.model has an empty token"),
        (b"IQ==\n", "Line 1 of tiktoken.model is not a token and its rank"),
        (b"IQ== x\n", "Line 1 of tiktoken.model is not a token and its rank"),
        (b"IQ== -1\n", "Line 1 of tiktoken.model is not a token and its rank"),
        (b"IQ== +0\n", "Line 1 of tiktoken.model is not a token and its rank"),
        (b"IQ==  0\n", "Line 1 of tiktoken.model is not a token and its rank"),
        (b"IQ== 0\r\n", "Line 1 of tiktoken.model is not a token and its rank"),
        (b"IQ== 0 0\n", "Line 1 of tiktoken.model is not a token and its rank"),
        (b"\n", "Line 1 of tiktoken.model is not a token and its rank"),
        (b"IQ== " + b"9" * 30 + b"\n", "Line 1 of tiktoken.model is not a token and its rank"),
    ],
)
def test_a_wrong_line_is_named(small_dir: Path, line: bytes, headline: str) -> None:
    assert headline in refusal(edit_lines(small_dir, put(0, line)))


def test_a_repeated_token_is_named(small_dir: Path) -> None:
    text = refusal(edit_lines(small_dir, put(1, b"IQ== 1\n")))
    assert "Line 2 of tiktoken.model repeats a token" in text
    assert "b'!' with ranks 0 and 1" in text


def test_a_rank_given_twice_is_named(small_dir: Path) -> None:
    text = refusal(edit_lines(small_dir, put(1, b"Ig== 0\n")))
    assert "ranks in tiktoken.model are not dense" in text
    assert """rank 0 for b'!' and b'"'""" in text


def test_a_hole_in_the_ranks_is_named(small_dir: Path) -> None:
    text = refusal(edit_lines(small_dir, lambda lines: lines.__setitem__(-1, b"J3M= 270\n")))
    assert "each of 0..269 once" in text
    assert "rank 269 nowhere" in text


def test_a_missing_single_byte_is_named(small_dir: Path) -> None:
    text = refusal(edit_lines(small_dir, put(2, b"enp6eg== 2\n")))
    assert "1 of the 256 single bytes have no rank" in text
    assert "none for 0x23" in text


def test_an_empty_rank_file_is_refused(small_dir: Path) -> None:
    (small_dir / "tiktoken.model").write_bytes(b"")
    assert "256 of the 256 single bytes have no rank" in refusal(small_dir)


def test_a_rank_file_cut_in_a_line_is_refused(small_dir: Path) -> None:
    path = small_dir / "tiktoken.model"
    path.write_bytes(path.read_bytes()[:-7])
    assert "Line 270 of tiktoken.model" in refusal(small_dir)


def test_more_ranks_than_the_model_has_rows_are_refused(small_dir: Path) -> None:
    text = refusal(small_dir, vocab_size=NUM_RANKS - 1)
    assert "at most vocab_size 269 ranks" in text
    assert "270 ranks" in text


def change_token(token_id: str, **fields: object) -> Callable[[dict[str, Any]], object]:
    return lambda raw: raw["added_tokens_decoder"][token_id].update(fields)


def move_token(old: str, new: str) -> Callable[[dict[str, Any]], object]:
    def move(raw: dict[str, Any]) -> None:
        raw["added_tokens_decoder"][new] = raw["added_tokens_decoder"].pop(old)

    return move


@pytest.mark.parametrize(
    ("change", "expected", "found"),
    [
        (move_token(END, "269"), "ids from 270", "269"),
        (move_token(END, "280"), "ids below vocab_size 280", "280"),
        (move_token(END, "-1"), "a decimal id", "'-1'"),
        (move_token(END, "0271"), "a decimal id", "'0271'"),
        (move_token(END, "x"), "a decimal id", "'x'"),
        (move_token(END, "9" * 5000), "a decimal id", "'999"),
        (change_token(END, content="[EOS]"), "a name of its own for each id", "'[EOS]' for 270 and 271"),
        (
            change_token(END, content="<|reserved_token_275|>"),
            "a name of its own for each id",
            "'<|reserved_token_275|>' for 271 and 275",
        ),
        (change_token(END, content="[EOS]x"), "none begins with another", "'[EOS]' and '[EOS]x'"),
        (change_token(END, content=""), "a name", "''"),
        (change_token(END, content=7), "a name", "7"),
        (change_token(END, special=1), "true or false", "1"),
        (change_token(END, lstrip=True), "false", "True"),
        (change_token(END, normalized=True), "false", "True"),
        (change_token(END, rank=3), "content", "'rank' unknown"),
        (lambda raw: raw["added_tokens_decoder"][END].pop("special"), "content", "'special' missing"),
        (lambda raw: raw["added_tokens_decoder"].update({END: "x"}), "content", "str"),
        (lambda raw: raw.update(added_tokens_decoder=[]), "an object from id to token", "list"),
        (lambda raw: raw.pop("added_tokens_decoder"), "the field 'added_tokens_decoder'", "no such field"),
        (lambda raw: raw.pop("eos_token"), "the field 'eos_token'", "no such field"),
        (lambda raw: raw.update(eos_token=None), "a name from", "None"),
        (lambda raw: raw.update(eos_token="<eos>"), "a name from", "'<eos>'"),
        (lambda raw: raw.update(unk_token="?"), "a name from", "'?'"),
        (lambda raw: raw.update(additional_special_tokens=["?"]), "a name from", "'?'"),
        (lambda raw: raw.update(additional_special_tokens="?"), "a list of names", "str"),
        (lambda raw: raw.update(tokenizer_class="LlamaTokenizer"), "'TikTokenTokenizer'", "'LlamaTokenizer'"),
        (lambda raw: raw.update(clean_up_tokenization_spaces=True), "False", "True"),
        (lambda raw: raw.update(extra_special_tokens={"a": "b"}), "{}", "{'a': 'b'}"),
        (lambda raw: raw.update(add_bos_token=True), "the nearest is", "'add_bos_token': True"),
    ],
)
def test_a_wrong_config_is_refused(
    rewrite_config: Rewrite, change: Callable[[dict[str, Any]], object], expected: str, found: str
) -> None:
    text = refusal(rewrite_config(change))
    rows = dict(line.strip().split(maxsplit=1) for line in text.splitlines() if line.startswith("    "))
    assert "tokenizer_config.json" in rows["file"]
    assert expected in rows["expected"]
    assert found in rows["found"]


@pytest.mark.parametrize("text", ["", "[]", '{"eos_token": "a", "eos_token": "b"}'])
def test_a_config_that_is_no_json_object_is_refused(small_dir: Path, text: str) -> None:
    (small_dir / "tokenizer_config.json").write_text(text)
    assert "tokenizer_config.json" in refusal(small_dir)
