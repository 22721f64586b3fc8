"""Stop strings end a text at the same character however it arrives."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twoends.errors import OptionError
from twoends.generate.stop import StopMatcher

STOPS = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=5), max_size=4)


def ended_plainly(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The rule: the first character at which a stop string is complete; the longest of those."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


def run(pieces: list[str], stops: list[str]) -> tuple[list[str], str | None]:
    matcher = StopMatcher(stops)
    sure = []
    for piece in pieces:
        text, found = matcher.push(piece)
        sure.append(text)
        if found is not None:
            return sure, found
    return [*sure, matcher.flush()], None


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    borders = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[start:end] for start, end in itertools.pairwise(borders)]


@given(
    text=st.text(alphabet="abc\n", max_size=40), stops=STOPS, cuts=st.lists(st.integers(0, 99), max_size=9)
)
def test_pieces_do_not_matter(text: str, stops: list[str], cuts: list[int]) -> None:
    sure, found = run(pieces_of(text, cuts), stops)
    assert ("".join(sure), found) == ended_plainly(text, stops)


@given(text=st.text(alphabet="abc\n", max_size=40), stops=STOPS)
def test_no_more_is_held_than_may_begin_a_stop_string(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    given_out = ""
    for end, character in enumerate(text, start=1):
        sure, found = matcher.push(character)
        given_out += sure
        if found is not None:
            return
        held = text[len(given_out) : end]
        starts = [n for stop in stops for n in range(1, len(stop)) if text[:end].endswith(stop[:n])]
        assert len(held) == max(starts, default=0)


@pytest.mark.parametrize(
    ("text", "stops", "left", "found"),
    [
        ("abcd", ["abcd", "bc"], "a", "bc"),
        ("abc", ["bc", "abc"], "", "abc"),
        ("aab", ["ab"], "a", "ab"),
        ("ababac", ["abac"], "ab", "abac"),
        ("x\n\ny", ["\n\n", "\n"], "x", "\n"),
    ],
)
def test_the_first_to_be_complete_ends_the_text(text: str, stops: list[str], left: str, found: str) -> None:
    sure, got = run([text], stops)
    assert ("".join(sure), got) == (left, found)


def test_without_stop_strings_nothing_is_held() -> None:
    assert StopMatcher(()).push("abc") == ("abc", None)


def test_a_beginning_that_came_to_nothing_is_given_out() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("the E") == ("the ", None)
    assert matcher.push("N") == ("", None)
    assert matcher.push("!") == ("EN!", None)
    assert matcher.push("EN") == ("", None)
    assert matcher.flush() == "EN"


@pytest.mark.parametrize("stops", [[""], ["a", ""], [3]])
def test_a_stop_string_without_characters_is_refused(stops: list[str]) -> None:
    with pytest.raises(OptionError, match=r"has no character; give at least one"):
        StopMatcher(stops)


def test_one_string_in_place_of_a_sequence_is_refused() -> None:
    with pytest.raises(OptionError, match=r"one string, 'END'; give a sequence"):
        StopMatcher("END")
