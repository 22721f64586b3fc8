"""Reading routing traces: our own and the two public forms, and what is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest

from twoends.bench.traces import check_model, read_trace
from twoends.errors import OptionError

MODEL = {"t_s": 0.0, "event": "model", "fingerprint": "f1", "policy": "decayed", "slots": 4}


def write_lines(path, *objects, end="\n"):
    path.write_text("\n".join(json.dumps(o) for o in objects) + end)
    return path


def write_sweeps(path, *prefixes):
    """Sweeps over two layers; expert = 100 * token + 16 * layer + rank: each pair says where it is."""
    pairs = [
        (layer, 100 * token + 16 * layer + rank)
        for tokens in prefixes
        for layer in (1, 2)
        for token in range(tokens)
        for rank in range(16)
    ]
    np.array(pairs, "<i4").tofile(path)
    return path


def test_our_trace_gives_its_routes_in_order_and_its_model(tmp_path):
    path = write_lines(
        tmp_path / "t",
        MODEL,
        {"event": "pass", "position": 0, "tokens": 2},
        {"event": "route", "layer": 1, "ids": [[3, 1], [1, 2]]},
        {"event": "hit", "layer": 1, "expert": 3},
        {"event": "route", "layer": 2, "ids": [[0, 1], [4, 0]]},
    )
    trace = read_trace(path)
    assert (trace.fingerprint, trace.ranked, trace.form) == ("f1", True, "ours")
    assert (trace.num_tokens, trace.cycle_slots, trace.num_experts) == (2, 4, 5)
    # What both tokens of the pass ask for is read once.
    assert trace.requests() == [(1, 3), (1, 1), (1, 2), (2, 0), (2, 1), (2, 4)]


def test_a_last_line_that_was_cut_by_a_full_disk_is_left_out(tmp_path):
    whole = {"event": "route", "layer": 1, "ids": [[3]]}
    path = write_lines(tmp_path / "t", MODEL, whole, {"event": "route", "layer": 1, "ids": [[4]]}, end="")
    assert read_trace(path).requests() == [(1, 3)]


def test_token_lines_are_unranked_and_begin_at_layer_1(tmp_path):
    path = write_lines(tmp_path / "t", {"layers": [[1, 5], [0, 2]]}, {"layers": [[1, 6], [3, 7]]})
    trace = read_trace(path)
    assert (trace.ranked, trace.fingerprint, trace.num_tokens, trace.cycle_slots) == (False, None, 2, 4)
    assert trace.requests() == [(1, 1), (1, 5), (2, 0), (2, 2), (1, 1), (1, 6), (2, 3), (2, 7)]


def test_decode_order_keeps_the_first_sweep_and_the_last_token_of_the_others(tmp_path):
    trace = read_trace(write_sweeps(tmp_path / "t", 2, 3, 4))
    begins = [(step.layer, int(step.ids_TS[0, 0])) for step in trace.steps]
    assert begins == [(1, 16), (2, 32), (1, 116), (2, 132), (1, 216), (2, 232), (1, 316), (2, 332)]
    assert trace.ranked


def test_file_order_keeps_all_pairs(tmp_path):
    path = write_sweeps(tmp_path / "t", 2, 3)
    assert read_trace(path, order="file").requests() == [
        tuple(pair) for pair in np.fromfile(path, "<i4").reshape(-1, 2).tolist()
    ]


def test_first_tokens_cuts_after_whole_tokens(tmp_path):
    trace = read_trace(write_sweeps(tmp_path / "t", 2, 3, 4)).first_tokens(3)
    assert (trace.num_tokens, len(trace.steps)) == (3, 6)


def test_a_trace_of_another_model_is_refused_with_both_fingerprints(tmp_path):
    path = write_lines(tmp_path / "t.jsonl", MODEL, {"event": "route", "layer": 1, "ids": [[3]]})
    trace = read_trace(path)
    check_model(trace, "f1", path=path)
    with pytest.raises(OptionError, match=r"t.jsonl is not a trace of this model") as error:
        check_model(trace, "f2", path=path)
    assert ("this model", "f2") in error.value.evidence
    assert ("trace", "f1") in error.value.evidence


ROUTE = {"event": "route", "layer": 1, "ids": [[3]]}


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ([MODEL], "has no routing in it"),
        ([ROUTE], "a trace begins with the event 'model'"),
        ([MODEL, ROUTE, MODEL], "a second run begins here"),
        ([MODEL, {"event": "route", "layer": 1, "ids": [[3], [1, 2]]}], "not lists of whole numbers"),
        ([MODEL, {"event": "route", "layer": -1, "ids": [[3]]}], "it has no layer"),
        ([MODEL, {"event": "route", "layer": 1, "ids": [[-3]]}], "below zero"),
        ([MODEL, {"event": "route", "layer": 1, "ids": [[2.5]]}], "not lists of whole numbers"),
        ([MODEL, {"event": "route", "layer": 1}], "not lists of whole numbers"),
        ([{"layers": []}], "neither an event nor a list of layers"),
        ([{"layers": [[1]]}, [1]], "not a JSON object"),
    ],
)
def test_a_malformed_trace_is_refused_with_its_reason(tmp_path, lines, reason):
    with pytest.raises(OptionError, match=reason):
        read_trace(write_lines(tmp_path / "t", *lines))


@pytest.mark.parametrize("data", [b"", b"123", b"\1\0\0\0\2\0\0\0"], ids=["empty", "odd", "one pair"])
def test_bytes_that_are_no_sweeps_are_refused(tmp_path, data):
    (tmp_path / "t").write_bytes(data)
    with pytest.raises(OptionError, match="is no routing trace"):
        read_trace(tmp_path / "t")


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(OptionError, match=r"nowhere can't be read: No such file or directory"):
        read_trace(tmp_path / "nowhere")
