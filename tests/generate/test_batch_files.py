"""The two files of a batch: a broken input is refused with its line, an output is continued or refused."""

from __future__ import annotations

import errno
import json
import os

import pytest

from twoends.errors import DoesNotFit, OptionError
from twoends.generate.batch_input import BatchInput
from twoends.generate.batch_results import BatchResults

GOOD = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}


def line(custom_id: str, **fields) -> str:
    return json.dumps({**GOOD, "custom_id": custom_id, **fields})


@pytest.fixture
def source(tmp_path):
    """Three requests, with an empty line between."""
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join([line("a"), "", line("b"), line("c")]) + "\n")
    return BatchInput(path)


def results(source, name="out.jsonl", fingerprint="f"):
    return BatchResults(source.path.with_name(name), source, fingerprint=fingerprint)


def test_requests_are_found_by_index_and_by_name(source):
    assert len(source) == 3
    assert [found.custom_id for found in source.lines(iter([2, 0]))] == ["c", "a"]
    assert [found.number for found in source.lines(iter([0, 1, 2]))] == [1, 3, 4]
    assert source.index_of("b") == 1
    assert source.index_of("no") is None


@pytest.mark.parametrize("ending", ["\n", "", "\n\n", "\r\n"])
def test_the_last_line_may_end_in_any_way(tmp_path, ending):
    (tmp_path / "in").write_bytes((line("a") + "\n" + line("b") + ending).encode())
    assert len(BatchInput(tmp_path / "in")) == 2


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (b"{", "line 2 of {path} is not JSON"),
        (b"[1, 2]", "line 2 of {path} is not a JSON object"),
        (b'{"custom_id": "\xff"}', "line 2 of {path} is not JSON"),
        (b"[" * 100_000, "line 2 of {path} is not JSON"),
        (b'{"custom_id": ' + b"1" * 5000 + b"}", "line 2 of {path}"),
        (b'{"custom_id": "b", "body": {"n": 1, "n": 1}}', "line 2 of {path} is not JSON: the name 'n' is"),
        (b'{"method": "POST"}', "line 2 of {path} has no custom_id"),
        (b'{"custom_id": ""}', "line 2 of {path} has no custom_id"),
        (b'{"custom_id": 7}', "line 2 of {path} has no custom_id"),
        (line("a").encode(), "line 2 of {path} has the custom_id of line 1: 'a'"),
        (b'{"custom_id": "' + b"b" * (1 << 24) + b'"}', "line 2 of {path} is longer than 16 MiB"),
    ],
    ids=[
        "cut",
        "list",
        "latin",
        "deep",
        "long number",
        "name twice",
        "no id",
        "empty id",
        "number",
        "twice",
        "long",
    ],
)
def test_a_broken_line_is_refused_with_its_number(tmp_path, bad, says):
    path = tmp_path / "in"
    path.write_bytes(line("a").encode() + b"\n" + bad + b"\n" + line("z").encode() + b"\n")
    with pytest.raises(OptionError) as caught:
        BatchInput(path)
    assert caught.value.headline.startswith(says.format(path=path))


@pytest.mark.parametrize("data", ["", "\n \n"])
def test_a_file_without_a_request_is_refused(tmp_path, data):
    (tmp_path / "in").write_text(data)
    with pytest.raises(OptionError, match="has no request"):
        BatchInput(tmp_path / "in")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(OptionError, match="gone can't be read: No such file"):
        BatchInput(tmp_path / "gone")


def test_an_input_that_changes_under_the_work_is_noticed(source):
    source.path.write_text("\n".join([line("a"), "", line("x"), line("c")]) + "\n")
    with pytest.raises(OptionError, match="was changed while"):
        list(source.lines(iter([1])))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"method": "GET"}, "method is 'GET'"),
        ({"url": "/v1/chat/completions"}, "url is '/v1/chat/completions'; only '/v1/completions' is served"),
        ({"urll": "x"}, "the line has a field 'urll'"),
    ],
)
def test_what_a_line_asks_wrongly_is_named(tmp_path, fields, says):
    (tmp_path / "in").write_text(line("a", **fields))
    (found,) = BatchInput(tmp_path / "in").lines(iter([0]))
    with pytest.raises(OptionError) as caught:
        found.body("/v1/completions")
    assert says in caught.value.headline


def test_answers_are_kept_and_the_rest_is_missing(source):
    with results(source) as out:
        assert out.missing() == [0, 1, 2]
        out.append("b", {"status_code": 200}, None)
    with results(source) as out:
        assert (out.num_kept, out.missing()) == (1, [0, 2])
        out.append("a", {"status_code": 200}, None)
        out.append("c", {"status_code": 400}, {"message": "x"})
    with results(source) as out:
        assert (out.num_kept, out.missing()) == (3, [])
    found = [json.loads(one) for one in out.path.read_text().splitlines()]
    assert [one["custom_id"] for one in found] == ["b", "a", "c"]
    assert len({one["id"] for one in found}) == 3


@pytest.mark.parametrize("cut", [1, 2, 10, 60])
def test_a_line_that_a_kill_cut_is_done_again(source, cut):
    with results(source) as out:
        out.append("a", {"status_code": 200}, None)
        out.append("b", {"status_code": 200}, None)
    whole = out.path.read_bytes()
    os.truncate(out.path, len(whole) - cut)
    with results(source) as out:
        assert out.missing() == [1, 2]
        out.append("b", {"status_code": 200}, None)
    assert out.path.read_bytes() == whole


@pytest.mark.parametrize("what", ["model", "input"])
def test_answers_of_another_batch_are_refused_and_left_alone(source, what):
    with results(source) as out:
        out.append("a", {"status_code": 200}, None)
    before = out.path.read_bytes() + b"cut"
    out.path.write_bytes(before)
    fingerprint = "f"
    if what == "model":
        fingerprint = "g"
    else:
        source.path.write_text("\n".join([line("a"), "", line("b"), line("c", body={})]) + "\n")
    with pytest.raises(OptionError) as caught:
        results(BatchInput(source.path), fingerprint=fingerprint)
    assert f"it holds answers of another {what}" in caught.value.headline
    assert out.path.read_bytes() == before


@pytest.mark.parametrize("text", ["hello\n", "{}\n", "[]\n", '{"custom_id": 1, "id": 2}\n'])
def test_a_file_that_holds_something_else_is_refused_and_left_alone(source, text):
    path = source.path.with_name("out.jsonl")
    path.write_text(text)
    with pytest.raises(OptionError, match="line 1 is no answer of a batch"):
        results(source)
    assert path.read_text() == text


def test_an_answer_that_is_there_twice_is_refused(source):
    with results(source) as out:
        out.append("a", {"status_code": 200}, None)
    out.path.write_bytes(out.path.read_bytes() * 2)
    with pytest.raises(OptionError, match="answers 'a' a second time"):
        results(source)


def test_two_batches_can_not_write_one_file(source):
    with results(source), pytest.raises(OptionError, match="another process is writing"):
        results(source)


def test_the_input_is_never_the_output(source):
    before = source.path.read_bytes()
    with pytest.raises(OptionError, match="is the input"):
        results(source, name="in.jsonl")
    assert source.path.read_bytes() == before


def test_an_output_that_got_no_answer_is_not_left_behind(source):
    with results(source) as out:
        pass
    assert not out.path.exists()


@pytest.mark.parametrize("written", [0, 5])
def test_a_full_disk_leaves_whole_lines(source, monkeypatch, written):
    true_write = os.write

    def full(fd, data):
        if written:
            return true_write(fd, data[:written])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with results(source) as out:
        out.append("a", {"status_code": 200}, None)
        whole = out.path.read_bytes()
        monkeypatch.setattr(os, "write", full)
        with pytest.raises(DoesNotFit, match="No space left"):
            out.append("b", {"status_code": 200}, None)
        monkeypatch.setattr(os, "write", true_write)
        assert out.path.read_bytes() == whole
        assert out.missing() == [1, 2]
