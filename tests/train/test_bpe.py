"""The vocabulary: canonical ranks, the release's byte order, K3's cuts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("tokenizers", reason="the vocabulary trainer is in the train extra")

from twoends.train.bpe import (
    byte_order,
    encoding,
    rank_file,
    read_rank_file,
    tokenizer_config,
    train_ranks,
)
from twoends.train.rows import pack_rows, token_bytes
from twoends.train.stories import document, load_story_book

SHARED = Path(__file__).parents[3] / "shared" / "data"


@pytest.fixture(scope="module")
def ranks() -> list[bytes]:
    book = load_story_book()
    return train_ranks([document(1, i, kind="stories", book=book) for i in range(200)], num_ranks=600)


def test_every_rank_is_what_its_own_bytes_encode_to(ranks: list[bytes]) -> None:
    encoder = encoding(ranks)
    wrong = [t for rank, t in enumerate(ranks) if encoder._encode_single_piece(t) != [rank]]
    assert wrong == []
    assert len(set(ranks)) == len(ranks) == 600


@pytest.mark.parametrize(
    "text", ["Once upon a time", "h\u00e9llo \u4f60\u597d 12345\r\n\t x", "\U0001f600 [EOS]", ""]
)
def test_any_text_comes_back(text: str, ranks: list[bytes]) -> None:
    encoder = encoding(ranks)
    assert encoder.decode(encoder.encode_ordinary(text)) == text


def test_the_rank_file_reads_back(tmp_path: Path, ranks: list[bytes]) -> None:
    path = tmp_path / "tiktoken.model"
    path.write_text(rank_file(ranks))
    assert read_rank_file(path) == ranks


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("AB\u4f60\u597dc", ["AB", "\u4f60\u597d", "c"]),
        (" \u4e2d\u6587", [" ", "\u4e2d\u6587"]),
        ("!\n/x", ["!\n", "/x"]),
        ("don't STOP 1234", ["don't", " STOP", " ", "123", "4"]),
    ],
)
def test_text_is_cut_where_k3_cuts_it(text: str, pieces: list[str]) -> None:
    import regex

    from twoends.train.bpe import K3_PATTERN

    assert regex.findall(K3_PATTERN, text, flags=regex.V1) == pieces


@pytest.mark.skipif(not SHARED.is_dir(), reason=f"no {SHARED}")
def test_single_bytes_stand_in_the_order_of_the_release() -> None:
    assert read_rank_file(SHARED / "tokenizer" / "tiktoken.model")[:256] == byte_order()


@pytest.mark.skipif(not SHARED.is_dir(), reason=f"no {SHARED}")
def test_the_config_of_a_full_vocabulary_is_the_released_one() -> None:
    released = json.loads((SHARED / "kimi-k3" / "tokenizer_config.json").read_text())
    assert tokenizer_config(163584) == released


def test_a_row_starts_with_a_document_and_every_document_ends_with_eos(ranks: list[bytes]) -> None:
    encoder = encoding(ranks)
    documents = [f"story {i} about a cat" for i in range(60)]
    rows = pack_rows(documents, encoder=encoder, row_tokens=40, eos=601)
    starts = {tuple(encoder.encode_ordinary("story"))}
    assert {tuple(row[: len(next(iter(starts)))].tolist()) for row in rows} == starts
    assert rows.shape[1] == 41
    assert (rows == 601).sum(1).min() >= 1


def test_token_bytes_count_text_and_not_specials(ranks: list[bytes]) -> None:
    sizes = token_bytes(encoding(ranks))
    assert sizes[:600].tolist() == [len(token) for token in ranks]
    assert not np.any(sizes[600:])
