"""`twoends run` on a small checkpoint."""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import shutil
from types import SimpleNamespace

import pytest

from twoends.cli import load, report, run_model
from twoends.engine import open as engine_open
from twoends.engine.device import DiskRate, keep_rate

JSON_FIELDS = {
    *("model", "prompt_ids", "ids", "text", "finish", "logits_digest", "ids_digest", "kernels"),
    *("ram_bytes", "peak_rss_bytes", "held_bytes", "plan", "direct_io", "direct_io_reason"),
    *("bytes_read", "bytes_trunk", "bytes_experts", "bytes_embedding", "expert_requests", "expert_hits"),
    *("wait_s", "prefill_s", "decode_s", "token_s"),
}


def as_json(result):
    assert (result.code, result.err) == (0, "")
    return json.loads(result.out)


def test_stdout_has_the_text_and_a_line_end_and_nothing_else(twoends, nano):
    found = as_json(twoends("run", nano, "hello", "-n", 8, "--json"))
    result = twoends("run", nano, "hello", "-n", 8)
    assert (result.code, result.out) == (0, found["text"] + "\n")


def test_json_has_every_promised_field(twoends, nano):
    found = as_json(twoends("run", nano, "hello", "-n", 3, "--json"))
    assert found.keys() >= JSON_FIELDS
    assert found["bytes_read"] == sum(found[f"bytes_{kind}"] for kind in ("trunk", "experts", "embedding"))
    assert sum(row["num_bytes"] for row in found["plan"]["rows"]) == found["plan"]["total_bytes"]
    assert found["ids_digest"] == report.ids_digest(found["ids"])
    assert len(found["token_s"]) == 2


def test_ids_and_the_text_they_came_from_give_the_same(twoends, nano):
    by_text = as_json(twoends("run", nano, "hello", "-n", 4, "--json"))
    ids = ",".join(map(str, by_text["prompt_ids"]))
    by_ids = as_json(twoends("run", nano, "--ids", ids, "-n", 4, "--json"))
    assert by_ids["logits_digest"] == by_text["logits_digest"]


def test_a_prompt_comes_from_stdin(twoends, nano, monkeypatch):
    monkeypatch.setattr("sys.stdin", SimpleNamespace(read=lambda: "hello"))
    piped = as_json(twoends("run", nano, "-", "-n", 2, "--json"))
    assert piped["prompt_ids"] == as_json(twoends("run", nano, "hello", "-n", 2, "--json"))["prompt_ids"]


def test_the_card_holds_the_devices_rate_against_the_doctors(twoends, nano):
    assert (
        "while reading; no figure of its own (twoends doctor)" in twoends("run", nano, "hello", "-n", 2).err
    )
    rate = DiskRate(bytes_per_s=1e12, date="2026-11-30", is_direct=True, piece_bytes=8192, depth=3)
    keep_rate(nano, rate)
    assert "of the doctor's 1.00 TB/s" in twoends("run", nano, "hello", "-n", 2).err
    found = as_json(twoends("run", nano, "hello", "-n", 2, "--json"))
    assert (found["read_piece_bytes"], found["read_depth"]) == (8192, 3)
    assert found["disk"] == rate.as_object()
    assert found["read_bytes_per_s"] == found["bytes_read"] / found["reading_s"] > 0


def test_a_saved_profile_is_begun_with_and_changes_no_bit(twoends, nano, tmp_path):
    path = tmp_path / "p"
    plain = as_json(twoends("run", nano, "hello", "-n", 6, "--save-profile", path, "--json"))
    warm = as_json(twoends("run", nano, "hello", "-n", 6, "--profile", path, "--json"))
    assert warm["position_digests"] == plain["position_digests"]


@pytest.mark.parametrize("flag", ["--profile", "--save-profile"])
def test_a_profile_is_refused_where_the_policy_has_no_use_for_it(twoends, nano, flag):
    result = twoends("run", nano, "hello", "--policy", "lru", flag, "p")
    assert result.code == 2
    assert result.err.startswith(f"twoends: {flag} is of no use with --policy lru.\n")


def test_another_models_profile_is_refused(twoends, nano, nano_dirs, tmp_path):
    path = tmp_path / "p"
    as_json(twoends("run", nano, "hello", "-n", 1, "--save-profile", path, "--json"))
    result = twoends("run", nano_dirs["kimi-linear"], "hello", "--profile", path)
    assert result.code == 2
    assert result.err.startswith("twoends: --profile: p was not made by this model.\n")


def test_the_card_ends_with_both_digests(twoends, nano):
    found = as_json(twoends("run", nano, "hello", "-n", 4, "--json"))
    lines = twoends("run", nano, "hello", "-n", 4).err.splitlines()
    assert lines[0].startswith("Kimi K3   9 layers (6 KDA, 3 MLA)   3.8 MB on disk   budget ")
    digests = f"{found['ids_digest']}   logits b2:{found['logits_digest'][:8]}"
    assert lines[-1] == f"  ids        {digests}   equal at every budget"
    assert max(map(len, lines[1:])) <= 80 + len(str(nano))


def test_the_card_says_when_a_stop_text_ended_the_run(twoends, nano):
    text = as_json(twoends("run", nano, "hello", "-n", 8, "--json"))["text"]
    result = twoends("run", nano, "hello", "-n", 8, "--stop", text[3:5])
    assert (result.code, result.out) == (0, text[: text.index(text[3:5])] + "\n")
    assert "  ended " in result.err
    assert result.err.count("at a text of --stop") == 1


def test_a_run_below_the_floor_is_refused_before_a_weight_is_read(twoends, nano):
    result = twoends("run", nano, "hello", "--ram", "1MB")
    assert (result.code, result.out) == (3, "")
    assert result.err.startswith("twoends: this model needs at least ")
    assert "the budget is 1.0 MB." in result.err


def test_a_peak_above_the_budget_is_called_a_defect(twoends, nano, monkeypatch):
    monkeypatch.setattr(run_model, "peak_resident_bytes", lambda: 10**15)
    result = twoends("run", nano, "hello", "-n", 1)
    assert result.code == 4
    assert "twoends: this run took 1,000.00 TB; --ram promised " in result.err


def test_a_saved_session_goes_on_exactly(twoends, nano, tmp_path):
    straight = as_json(twoends("run", nano, "hello", "-n", 9, "--json"))
    file = tmp_path / "half.session"
    first = as_json(twoends("run", nano, "hello", "-n", 4, "--save", file, "--json"))
    second = as_json(twoends("run", nano, "--load", file, "-n", 5, "--json"))
    assert first["session"] == str(file)
    assert first["ids"] + second["ids"] == straight["ids"]


def test_a_full_disk_while_saving_keeps_the_text_and_exits_3(twoends, nano, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10))
    file = tmp_path / "x.session"
    result = twoends("run", nano, "hello", "-n", 4, "--save", file)
    assert result.code == 3
    assert result.out != ""
    assert "twoends: the session needs " in result.err
    assert not file.exists()


def test_another_models_session_is_refused(twoends, nano_dirs, tmp_path):
    file = tmp_path / "k3.session"
    assert twoends("run", nano_dirs["kimi-k3"], "a", "-n", 1, "--save", file).code == 0
    result = twoends("run", nano_dirs["kimi-linear"], "--load", file)
    assert result.code == 2
    assert "was not made by this model" in result.err


def test_without_a_tokenizer_ids_still_run_and_it_says_so(twoends, nano, tmp_path):
    copy = tmp_path / "bare"
    shutil.copytree(nano, copy)
    (copy / "tiktoken.model").unlink()
    result = twoends("run", copy, "--ids", "1,2", "-n", 2)
    assert result.code == 0
    assert "has no tiktoken.model: ids only" in result.err
    assert twoends("run", copy, "hello").code == 2


def test_options_without_effect_are_mentioned(twoends, nano):
    result = twoends("run", nano, "hello", "-n", 1, "--seed", 3, "--top-k", 5)
    assert "--seed, --top-k without effect: --temperature is 0 (greedy)" in result.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "twoends: there is nothing to continue.\n"),
        (["x", "--ids", "1"], "twoends: a prompt and --ids both say what to continue; give one of them.\n"),
        (["--ids", "768"], "twoends: token id 768 is outside the vocabulary.\n"),
        (["x", "--context", "3"], "twoends: --context is 3; this run needs "),
        (
            ["x", "--load", "none.session"],
            "twoends: none.session can't be read: No such file or directory.\n",
        ),
        (["x", "--trace", "no/where"], "twoends: --trace: no/where can't be written: No such file"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_wishes_are_refused(twoends, nano, words, message):
    result = twoends("run", nano, *words)
    assert (result.code, result.out) == (2, "")
    assert message in result.err


def test_a_truncated_shard_is_refused_at_open(twoends, nano, tmp_path):
    copy = tmp_path / "short"
    shutil.copytree(nano, copy)
    shard = sorted(copy.glob("*.safetensors"))[3]
    with shard.open("r+b") as file:
        file.truncate(shard.stat().st_size - 5)
    result = twoends("run", copy, "hello")
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith(f"twoends: {shard.name} ends 5 bytes early")


def test_a_read_error_ends_the_run_and_keeps_the_text_so_far(twoends, nano, monkeypatch):
    # a budget near the floor reads in every pass
    monkeypatch.setattr(engine_open, "counted_bytes", lambda: 45_000_000)
    monkeypatch.setattr(run_model, "peak_resident_bytes", lambda: 0)
    words = ["run", nano, "hello", "-n", 12, "--no-direct", "--json"]
    floor = as_json(twoends(*words))["plan"]["floor_bytes"]
    whole = as_json(twoends(*words, "--ram", floor + 10**5))
    countdown = itertools.count(whole["num_reads"] // 2, -1)
    sound = os.preadv

    def worn_out(fd, buffers, offset):
        if next(countdown) < 0:
            raise OSError(errno.EIO, "Input/output error")
        return sound(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", worn_out)
    result = twoends(*words[:-1], "--ram", floor + 10**5)
    assert result.code == 1
    assert re.search(
        r"twoends: reading model-\d+-of-000010.safetensors failed: Input/output error", result.err
    )
    assert 1 < len(result.out) < len(whole["text"])
    assert whole["text"].startswith(result.out)


def test_a_trace_has_one_object_per_line(twoends, nano, tmp_path):
    file = tmp_path / "t.jsonl"
    assert twoends("run", nano, "hello", "-n", 2, "--trace", file).code == 0
    events = {json.loads(line)["event"] for line in file.read_text().splitlines()}
    assert events >= {"model", "pass", "read", "route", "miss"}


def test_one_word_that_is_no_directory_is_the_prompt_of_the_shipped_model(monkeypatch, tmp_path):
    monkeypatch.setattr(load, "shipped_model", lambda: tmp_path)
    assert load.model_and_prompt("Once", None, no_prompt=False) == (tmp_path, "Once")


def test_one_word_that_is_a_directory_is_the_model(tmp_path):
    assert load.model_and_prompt(str(tmp_path), None, no_prompt=False) == (tmp_path, None)


def test_a_path_that_is_not_there_is_no_prompt(twoends):
    result = twoends("run", "/no/such/model")
    assert result.code == 2
    assert result.err.startswith("twoends: there is no directory /no/such/model.\n")
