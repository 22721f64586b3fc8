"""`twoends batch` as a user has it: answers, refusals, stops at any point, exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# numpy's kernels: slow enough that a signal finds the batch at work.
SLOW = ["--kernels", "reference"]
BODIES = {
    "greedy": {"prompt": "hello", "max_tokens": 9},
    "ids": {"prompt": [5, 17, 300], "max_tokens": 4},
    "drawn": {
        "prompt": "a longer prompt than the others have",
        "max_tokens": 12,
        "temperature": 0.9,
        "seed": 5,
    },
    "short": {"prompt": "hello", "max_tokens": 1},
    "top": {"prompt": [1], "max_tokens": 8, "temperature": 1.5, "top_p": 0.5, "top_k": 9, "seed": 2},
}


@pytest.fixture
def places(tmp_path):
    """Where the requests and the answers are."""
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl"


def write(path: Path, bodies: dict, *, url="/v1/completions") -> None:
    lines = [{"custom_id": k, "method": "POST", "url": url, "body": body} for k, body in bodies.items()]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def read(path: Path) -> dict:
    """custom_id -> answer; each is there once, and every line is whole."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({line["custom_id"] for line in found}) == len(found)
    return {line["custom_id"]: line for line in found}


def contents(path: Path) -> dict:
    """The answers without the time at which they were made."""
    found = read(path)
    for line in found.values():
        line["response"]["body"].pop("created", None)
    return found


def words_of(body: dict) -> list[str]:
    """The words of `twoends run` that ask for the same."""
    prompt = body["prompt"]
    words = [prompt] if isinstance(prompt, str) else ["--ids", ",".join(map(str, prompt))]
    words += ["-n", body["max_tokens"]]
    for field in ("temperature", "top_p", "top_k", "seed", "stop"):
        if field in body:
            words += [f"--{field.replace('_', '-')}", body[field]]
    return words


@pytest.mark.parametrize("sequences", [1, 3, None])
def test_every_answer_is_that_of_a_run_of_its_own(twoends, nano, places, sequences):
    write(places[0], BODIES)
    more = [] if sequences is None else ["--sequences", sequences]
    result = twoends("batch", nano, *places, *more)
    assert (result.code, result.out) == (0, "")
    found = read(places[1])
    assert found.keys() == BODIES.keys()
    for custom_id, body in BODIES.items():
        alone = json.loads(twoends("run", nano, *words_of(body), "--json").out)
        answer = found[custom_id]
        assert answer["error"] is None
        assert answer["response"]["status_code"] == 200
        said = answer["response"]["body"]
        (choice,) = said["choices"]
        assert choice["token_ids"] == alone["ids"]
        assert choice["text"] == alone["text"]
        assert choice["logits_digest"] == alone["logits_digest"]
        assert said["usage"]["prompt_tokens"] == len(alone["prompt_ids"])
        assert said["usage"]["completion_tokens"] == len(alone["ids"])
        assert said["system_fingerprint"] == alone["fingerprint"]


def test_the_model_that_ships_answers_where_none_is_named(twoends, places):
    write(places[0], {"a": {"prompt": "Once upon a time", "max_tokens": 8, "model": "what I call it"}})
    assert twoends("batch", *places).code == 0
    body = read(places[1])["a"]["response"]["body"]
    assert body["model"] == "what I call it"
    alone = json.loads(twoends("run", "Once upon a time", "-n", 8, "--json").out)
    assert body["choices"][0]["text"] == alone["text"]
    assert body["choices"][0]["finish_reason"] == "length"


def test_a_stop_string_ends_its_own_text_only(twoends, nano, places):
    write(places[0], {"a": {"prompt": "hello", "max_tokens": 12}})
    twoends("batch", nano, *places)
    text = read(places[1])["a"]["response"]["body"]["choices"][0]["text"]
    stop = text[len(text) // 2]
    bodies = {
        "a": {"prompt": "hello", "max_tokens": 12},
        "b": {"prompt": "hello", "max_tokens": 12, "stop": stop},
    }
    write(places[0], bodies)
    places[1].unlink()
    assert twoends("batch", nano, *places).code == 0
    choices = {key: found["response"]["body"]["choices"][0] for key, found in read(places[1]).items()}
    assert choices["a"]["text"] == text
    assert (choices["b"]["text"], choices["b"]["finish_reason"]) == (text[: text.index(stop)], "stop")


def test_a_request_that_can_not_be_done_has_its_error_and_the_rest_goes_on(twoends, nano, places):
    bodies = {"bad": {"prompt": "x", "logprobs": 3}, "good": {"prompt": "x", "max_tokens": 2}, "n": {"n": 2}}
    write(places[0], bodies)
    with places[0].open("a") as file:
        chat = {
            "custom_id": "chat",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"messages": []},
        }
        file.write(json.dumps(chat))
    result = twoends("batch", nano, *places)
    assert result.code == 0
    assert "1 of 4 requests; 3 refused, each with its reason" in result.err
    found = read(places[1])
    assert found["good"]["response"]["status_code"] == 200
    said = {}
    for key in ("bad", "n", "chat"):
        assert found[key]["response"]["status_code"] == 400
        said[key] = found[key]["error"]["message"]
        assert found[key]["response"]["body"]["error"]["message"] == said[key]
    assert "'logprobs'" in said["bad"]
    assert "n is 2" in said["n"]
    assert "/v1/chat/completions" in said["chat"]


def test_a_context_that_is_named_refuses_what_is_longer(twoends, nano, places):
    write(
        places[0],
        {"long": {"prompt": [1] * 6, "max_tokens": 5}, "fits": {"prompt": [1] * 5, "max_tokens": 5}},
    )
    assert twoends("batch", nano, *places, "--context", 10).code == 0
    found = read(places[1])
    assert (
        "6 tokens of prompt and 5 new ones are more than the context of 10"
        in found["long"]["error"]["message"]
    )
    assert found["fits"]["error"] is None


def test_a_file_that_is_not_json_is_refused_before_any_work(twoends, nano, places):
    write(places[0], BODIES)
    with places[0].open("a") as file:
        file.write('{"custom_id": "half"')
    result = twoends("batch", nano, *places)
    assert (result.code, result.out) == (2, "")
    assert f"line {len(BODIES) + 1} of {places[0]} is not JSON" in result.err
    assert not places[1].exists()


def test_a_batch_that_is_whole_does_nothing_more(twoends, nano, places):
    write(places[0], BODIES)
    twoends("batch", nano, *places)
    before = places[1].read_bytes()
    result = twoends("batch", nano, *places)
    assert result.code == 0
    assert f"all of {len(BODIES)} requests are answered" in result.err
    assert places[1].read_bytes() == before
    found = json.loads(twoends("batch", nano, *places, "--json").out)
    assert (found["num_kept"], found["num_answered"]) == (len(BODIES), 0)


@pytest.mark.parametrize("what", ["input", "model"])
def test_a_batch_of_another_input_or_model_is_refused(twoends, nano_dirs, places, what):
    write(places[0], BODIES)
    twoends("batch", nano_dirs["kimi-k3"], *places)
    before = places[1].read_bytes()
    model = nano_dirs["kimi-k3"]
    if what == "model":
        model = nano_dirs["kimi-linear"]
    else:
        write(places[0], {**BODIES, "one more": {"prompt": "x"}})
    result = twoends("batch", model, *places)
    assert result.code == 2
    assert f"it holds answers of another {what}" in result.err
    assert places[1].read_bytes() == before


def test_json_has_the_counts_and_the_plan(twoends, nano, places):
    write(places[0], BODIES)
    result = twoends("batch", nano, *places, "--sequences", 4, "--json")
    assert (result.code, result.err) == (0, "")
    found = json.loads(result.out)
    new = sum(body["max_tokens"] for body in BODIES.values())
    assert (found["num_answered"], found["new_tokens"], found["num_left"]) == (len(BODIES), new, 0)
    assert found["num_sequences"] == found["plan"]["num_sequences"] == 4
    assert found["num_rows"] == found["prompt_tokens"] + new - len(BODIES)
    assert found["rows_per_pass"] == found["num_rows"] / found["num_passes"] > 1.5
    assert found["bytes_per_new_token"] == found["bytes_read"] / new
    assert found["peak_rss_bytes"] <= found["ram_bytes"]


def test_fewer_requests_than_sequences_take_no_room_for_more(twoends, nano, places):
    write(
        places[0],
        {"a": {"prompt": [1], "max_tokens": 1}, "bad": {"n": 2}, "b": {"prompt": [1], "max_tokens": 2}},
    )
    found = json.loads(twoends("batch", nano, *places, "--json").out)
    assert found["num_sequences"] == 2
    assert found["plan"]["context_tokens"] == 3


def test_too_little_memory_is_refused_with_the_sum_and_leaves_nothing(twoends, nano, places):
    write(places[0], BODIES)
    result = twoends("batch", nano, *places, "--sequences", 8, "--ram", "1MB")
    assert result.code == 3
    assert " KDA layers, 8 sequences" in result.err
    assert "--sequences below 8" in result.err
    assert not places[1].exists()


@pytest.mark.parametrize("words", [[], ["one"], ["a", "b", "c", "d"]])
def test_the_words_are_counted(twoends, words):
    result = twoends("batch", *words)
    assert result.code == 2
    assert "twoends batch [MODEL] INPUT OUTPUT" in result.err


def start(*words: object) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "twoends", *map(str, words)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)


def wait_for_lines(path: Path, count: int, process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + 60
    while not path.exists() or path.read_bytes().count(b"\n") < count:
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < until
        time.sleep(0.005)


@pytest.fixture
def many(places):
    """Ten requests, of which one or two end in almost every pass; the last is long enough to be stopped."""
    lengths = [1 + i // 2 for i in range(9)] + [24]
    bodies = {
        f"r{i}": {"prompt": [i + 1, 5], "max_tokens": length, "temperature": 0.5, "seed": i}
        for i, length in enumerate(lengths)
    }
    write(places[0], bodies)
    return bodies


@pytest.mark.parametrize("lines", [1, 4, 8])
def test_a_killed_batch_is_done_by_the_same_command_and_nothing_twice(twoends, nano, places, many, lines):
    process = start("batch", nano, *places, "--sequences", 3, *SLOW)
    wait_for_lines(places[1], lines, process)
    process.kill()
    process.wait()
    process.stderr.close()
    kept = places[1].read_bytes()
    assert lines <= kept.count(b"\n") < len(many)
    again = json.loads(twoends("batch", nano, *places, "--json").out)
    assert again["num_kept"] == kept[: kept.rindex(b"\n") + 1].count(b"\n")
    assert again["num_answered"] == len(many) - again["num_kept"]
    assert places[1].read_bytes().startswith(kept[: kept.rindex(b"\n") + 1])
    straight = places[1].with_name("straight.jsonl")
    twoends("batch", nano, places[0], straight, "--sequences", 1)
    assert contents(places[1]) == contents(straight)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda n: n.name)
def test_a_signal_ends_after_the_pass_and_the_same_command_goes_on(twoends, nano, places, many, number):
    process = start("batch", nano, *places, "--sequences", 3, *SLOW)
    wait_for_lines(places[1], 2, process)
    process.send_signal(number)
    with process:
        err = process.stderr.read()
    assert process.returncode == 1
    assert f"twoends: {number.name}: finishing this pass, then stopping; once more stops now.\n" in err
    left = len(many) - places[1].read_bytes().count(b"\n")
    assert 0 < left < len(many) - 1
    assert f"stopped with {left} of 10 requests left." in err
    assert "The same command does the rest." in err
    assert twoends("batch", nano, *places).code == 0
    assert read(places[1]).keys() == many.keys()
