"""twoends/cli/screen.py and live.py: what is drawn, character by character."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest

from twoends.cli.live import RunProgress
from twoends.cli.screen import Screen, bar, columns, facts, progress_bar, share_text
from twoends.generate.stream import Piece


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def on_pipe(**more):
    return Screen(out=io.StringIO(), err=io.StringIO(), colour=False, is_live=False, **more)


def a_model(bytes_per_token=134_640_000_000):
    return SimpleNamespace(
        config=SimpleNamespace(num_layers=93, is_mla=lambda layer: layer % 4 == 3),
        plan=SimpleNamespace(bytes_per_token=bytes_per_token),
        counters=SimpleNamespace(bytes_read=0),
    )


@pytest.mark.parametrize(
    ("share", "drawn"), [(0, ""), (0.004, ""), (0.02, "#"), (0.5, "#####"), (1, "#" * 10), (7, "#" * 10)]
)
def test_a_bar_shows_its_share(share, drawn):
    assert bar(share) == drawn


def test_a_progress_bar_is_full_only_at_the_end():
    assert [progress_bar(share, 4) for share in (0, 0.99, 1)] == ["[....]", "[###.]", "[####]"]


def test_columns_align_numbers_to_the_right():
    assert columns([["a", "1"], ["bcd", "200"]], right=(1,)) == ["  a      1", "  bcd  200"]


def test_what_follows_two_spaces_is_kept_whole_to_be_pasted():
    command = "apt install " + "x" * 80
    lines = facts([("kernels", f"numpy, slow. Fast ones:  {command}")])
    assert lines == ["  kernels   numpy, slow. Fast ones:", f"    {command}"]


@pytest.mark.parametrize(
    ("part", "whole", "text"), [(0, 0, "0 %"), (0, 5, "0 %"), (1, 300, "0.3 %"), (87, 100, "87 %")]
)
def test_shares_are_honest_when_small(part, whole, text):
    assert share_text(part, whole) == text


def test_a_quiet_screen_still_shows_errors():
    screen = on_pipe(quiet=True)
    screen.note("narration")
    screen.alert("trouble")
    assert screen.err.getvalue() == "trouble\n"


def test_the_live_line_keeps_the_place_of_the_text():
    screen = Screen(out=Terminal(), err=Terminal(), colour=False, is_live=True)
    screen.text("once")
    screen.live("  working")
    screen.text(" upon")
    # room below, save, one down, clear, draw, restore; then the same without a line
    assert screen.err.getvalue() == "\x1bD\x1bM\x1b7\x1bD\r\x1b[K  working\x1b8\x1b7\x1bD\r\x1b[K\x1b8"
    assert screen.out.getvalue() == "once upon"


def test_a_terminal_is_not_given_control_characters_but_a_pipe_is():
    terminal = Screen(out=Terminal(), err=io.StringIO(), colour=False, is_live=False)
    pipe = on_pipe()
    for screen in (terminal, pipe):
        screen.text("a\x1b[2Jb\tc\n")
    assert terminal.out.getvalue() == "a\ufffd[2Jb\tc\n"
    assert pipe.out.getvalue() == "a\x1b[2Jb\tc\n"


def test_narration_on_the_terminal_of_the_text_begins_a_line():
    screen = Screen(out=Terminal(), err=Terminal(), colour=False, is_live=False)
    screen.text("once")
    screen.note("twoends: stopping")
    screen.note("more")
    assert screen.err.getvalue() == "\ntwoends: stopping\nmore\n"


def test_a_slow_token_on_a_pipe_gets_one_plain_line():
    screen, model, now = on_pipe(), a_model(), SimpleNamespace(s=0.0)
    progress = RunProgress(screen, model, num_new=8, clock=lambda: now.s)
    now.s, model.counters.bytes_read = 1.0, 10**9
    progress.prefill(5, 5)
    progress.token(1, Piece(text=" Paris"))
    now.s, model.counters.bytes_read = 33.7, 10**9 + 134_640_000_000
    progress.layer(93)
    progress.token(2, Piece(text="."))
    assert screen.out.getvalue() == " Paris."
    assert screen.err.getvalue() == "  token 2 of 8   32.7 s   134.64 GB read   4.12 GB/s\n"


@pytest.mark.parametrize("num_new", [8, 1_000_000])
def test_the_live_line_fits_eighty_columns(num_new):
    screen, model, now = Screen(out=io.StringIO(), err=Terminal(), colour=False, is_live=True), a_model(), 0.0
    progress = RunProgress(screen, model, num_new=num_new, clock=lambda: now)
    progress.prefill(5, 5)
    progress.token(1, Piece(text=""))
    now, model.counters.bytes_read = 16.0, 61_200_000_000
    progress.layer(47)
    line = screen.err.getvalue().split("\x1b[K")[1].split("\x1b8")[0]
    assert line.startswith("  token 2 of ")
    assert line.endswith(" 47/93 MLA  61.2 of 134.6 GB  3.83 GB/s  15.7 s left")
    assert len(line) < 80
