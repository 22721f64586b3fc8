"""`twoends eval`: figures that a plain softmax gives too, windows, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import twoends
from twoends.cli.main import call

TEXT = "Once upon a time, there was a clever fox named Pepper. Pepper lived near an old mill."


def _eval(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    assert call(["eval", *words, "--ram", "400MB", "--threads", "1", "--json"], environment={}) == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "fox.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def test_the_figures_are_those_of_a_softmax_over_every_prefix(
    text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with twoends.open_model(ram="400MB", threads=1, context=64, draft=31) as model:
        ids = model.tokenizer.encode(TEXT)
        logits = model.engine.run_pass(ids[:-1], layer_done=lambda done: None, all_rows=True).astype(float)
    surprise = np.log(np.exp(logits).sum(1)) - logits[np.arange(len(ids) - 1), ids[1:]]
    found = _eval(capsys, "--text", str(text))["texts"][str(text)]
    size = len(TEXT) - len("Once")
    assert found["bytes"] == size
    assert found["bits_per_byte"] == pytest.approx(surprise.sum() / np.log(2) / size, rel=1e-9)
    assert found["accuracy"] == np.mean(logits.argmax(1) == ids[1:])


@pytest.mark.parametrize("chunk", ["1", "3", "64"])
def test_the_bits_do_not_depend_on_the_chunk(
    text: Path, capsys: pytest.CaptureFixture[str], chunk: str
) -> None:
    assert _eval(capsys, "--text", str(text), "--chunk", chunk) == _eval(capsys, "--text", str(text))


def test_a_window_begins_from_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Twice the same eight tokens in windows of eight: the second tells what the first told."""
    with twoends.open_model(ram="400MB", threads=1, context=8) as model:
        ids = model.tokenizer.encode(TEXT)[:8]
        half = b"".join(model.tokenizer.token_bytes(i) for i in ids).decode()
    for name, words in (("once", half), ("twice", half + half)):
        (tmp_path / name).write_text(words)
    once = _eval(capsys, "--text", str(tmp_path / "once"), "--context", "8")["all"]
    twice = _eval(capsys, "--text", str(tmp_path / "twice"), "--context", "8")["all"]
    assert (twice["tokens"], twice["bytes"]) == (2 * once["tokens"], 2 * once["bytes"])
    assert twice["bits_per_byte"] == pytest.approx(once["bits_per_byte"], rel=1e-12)


def test_several_texts_are_told_one_by_one_and_together(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.txt"
    other.write_text("In the beginning God created the heavens and the earth.")
    found = _eval(capsys, "--text", str(text), "--text", str(other))
    assert found["all"]["bytes"] == sum(one["bytes"] for one in found["texts"].values())


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "can't be read"), (b"\xff\xfe", "is not UTF-8"), (b"a", "fewer than two tokens")],
)
def test_a_text_that_tells_nothing_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None, message: str
) -> None:
    path = tmp_path / "text"
    if content is not None:
        path.write_bytes(content)
    assert call(["eval", "--text", str(path)], environment={}) == 2
    assert message in capsys.readouterr().err


def test_a_text_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["eval"], environment={}) == 2
    assert "--text FILE" in capsys.readouterr().err
