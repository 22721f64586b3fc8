"""Ctrl-C, SIGTERM and a closed pipe, on real processes."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# numpy's kernels: slow enough that a signal finds the run at work. Greedy, this prompt meets no stop id.
SLOW = ["--kernels", "reference"]


def start(*words: object) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-m", "twoends", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def finish(process: subprocess.Popen[str]) -> tuple[str, str]:
    """What is left of stdout and stderr; not communicate(), which would lose what read() has buffered."""
    with process:
        return process.stdout.read(), process.stderr.read()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda n: n.name)
def test_a_signal_saves_the_session_and_says_how_to_go_on(twoends, nano, tmp_path, number):
    file = tmp_path / "mine.session"
    process = start("run", nano, "hello", "-n", 30, "--save", file, *SLOW)
    first = process.stdout.read(1)
    process.send_signal(number)
    out, err = finish(process)
    assert process.returncode == 1
    assert f"twoends: {number.name}: finishing this pass, then saving; once more stops now.\n" in err
    go_on = shlex.split(err.splitlines()[-1].removeprefix("  Go on:  "))
    assert go_on[:5] == ["twoends", "run", str(nano), "--load", str(file)]
    assert go_on[7:] == SLOW
    num_left = int(go_on[6])
    assert 0 < num_left < 30
    # every kernel gives the same bits, so the rest may come from the fast ones
    rest, straight = (
        json.loads(twoends(*words, "--json").out) for words in (go_on[1:7], ["run", nano, "hello", "-n", 30])
    )
    assert rest["ids"] == straight["ids"][30 - num_left :]
    assert (first + out).rstrip("\n") + rest["text"] == straight["text"]


def test_without_save_the_session_goes_here(nano):
    process = start("run", nano, "hello", "-n", 30, *SLOW)
    process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, err = finish(process)
    found = list(Path().glob("*"))
    assert [path.suffix for path in found] == [".session"]
    assert f"--load {found[0]}" in err


def test_a_second_signal_stops_at_once_and_saves_nothing(nano, tmp_path):
    file = tmp_path / "mine.session"
    file.write_text("an earlier one")
    prompt = "hello " * 300
    process = start("run", nano, prompt, "-n", 30, "--save", file, "--chunk", 512, *SLOW)
    for line in process.stderr:
        if line == "\n":
            break
    process.send_signal(signal.SIGINT)
    assert process.stderr.readline().startswith("twoends: SIGINT: finishing this pass")
    process.send_signal(signal.SIGINT)
    out, err = finish(process)
    assert (process.returncode, out) == (1, "")
    assert (
        err == f"twoends: stopped at once; no session was saved.\n\n  {file} is as it was before this run.\n"
    )
    assert file.read_text() == "an earlier one"


def test_a_closed_pipe_ends_the_run_without_a_word(nano):
    process = start("run", nano, "hello", "-n", 30, *SLOW)
    process.stdout.read(1)
    process.stdout.close()
    with process:
        err = process.stderr.read()
    assert process.returncode == 1
    assert "twoends:" not in err
    assert "Traceback" not in err
    assert "BrokenPipe" not in err
