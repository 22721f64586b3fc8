"""Drafts by prompt lookup, and how long they are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twoends.generate.draft_length import MAX_DRAFT, DraftLength
from twoends.generate.lookup import PromptLookup, lookup_bytes


def lookup_over(ids):
    lookup = PromptLookup(len(ids))
    lookup.extend(ids)
    return lookup


def test_what_followed_the_same_suffix_is_drafted():
    assert lookup_over([1, 2, 3, 4, 5, 9, 1, 2, 3]).draft(2) == [4, 5]


def test_the_latest_occurrence_counts():
    assert lookup_over([1, 2, 3, 7, 1, 2, 3, 8, 0, 1, 2, 3]).draft(1) == [8]


def test_a_longer_suffix_beats_a_later_short_one():
    ids = [5, 6, 1, 2, 40, 0, 1, 2, 41, 0, 0, 5, 6, 1, 2]
    assert lookup_over(ids).draft(1) == [40]


def test_a_loop_is_drafted_round_and_round():
    assert lookup_over([1, 2, 3, 1, 2, 3, 1, 2]).draft(5) == [3, 1, 2, 3, 1]


def test_an_earlier_text_is_copied_from_until_this_one_has_the_same_suffix():
    lookup = PromptLookup(20, before=[1, 2, 3, 4, 5, 6])
    lookup.extend([7, 8, 2, 3])
    assert lookup.draft(3) == [4, 5, 6]
    lookup.extend([7, 8, 2, 3, 9, 0, 2, 3])
    assert lookup.draft(1) == [9]


def test_a_suffix_never_reaches_back_into_the_earlier_text():
    lookup = PromptLookup(20, before=[1, 2, 3, 9, 1])
    lookup.extend([2])
    assert lookup.draft(1) == []


@pytest.mark.parametrize("size", [0, 1, 7, 1000])
def test_a_lookup_takes_the_bytes_that_its_row_says(size):
    lookup = PromptLookup(size)
    lookup.extend([i % 7 for i in range(size)])
    held = lookup._ids_N.nbytes + sum(ends.nbytes for ends in lookup._ends.values())
    assert held == lookup_bytes(size)


@pytest.mark.parametrize("ids", [[], [1], [1, 2], [1, 2, 3, 4, 5]], ids=len)
def test_nothing_is_drafted_where_nothing_came_again(ids):
    assert lookup_over(ids).draft(4) == []


@given(ids=st.lists(st.integers(0, 4), max_size=60), cut=st.integers(0, 60), most=st.integers(0, 8))
def test_a_draft_is_a_copy_of_the_past_whatever_the_pieces(ids, cut, most):
    lookup = PromptLookup(60)
    lookup.extend(ids[:cut])
    lookup.extend(ids)
    draft = lookup.draft(most)
    whole = PromptLookup(60)
    whole.extend(ids)
    assert draft == whole.draft(most)
    assert len(draft) in (0, most)
    if draft:
        joined = [*ids, *draft]
        period = next(p for p in range(1, len(ids)) if joined[len(ids) - 2 - p : len(ids) - p] == ids[-2:])
        assert period <= len(ids)
        assert set(draft) <= set(ids)


def test_nothing_streamed_means_no_draft():
    assert DraftLength(streamed_bytes=0, expert_bytes=10**6).choose() == 0


def test_a_streamed_trunk_and_right_drafts_make_long_ones():
    assert DraftLength(streamed_bytes=10**9, expert_bytes=10**8, acceptance=0.95).choose() == MAX_DRAFT


def test_wrong_drafts_make_short_ones():
    length = DraftLength(streamed_bytes=4 * 10**8, expert_bytes=10**8)
    first = length.choose()
    for _ in range(60):
        length.learn(drafted=4, kept=0)
    assert length.choose() < first
    for _ in range(200):
        length.learn(drafted=4, kept=4)
    assert length.choose() > first


def test_the_published_gain_of_a_streamed_trunk_comes_out():
    """108.81 GB streamed, 25.83 GB of experts, four drafts, acceptance 0.7: 1.94 times fewer bytes."""
    length = DraftLength(streamed_bytes=108_811_877_376, expert_bytes=25_829_572_608, acceptance=0.7)
    gain = length.bytes_per_token(0) / length.bytes_per_token(4)
    # The published table interpolates distinct experts a little differently.
    assert gain == pytest.approx(1.94, abs=0.03)
