"""The policies of comparison on traces small enough to follow by hand, and by properties on others."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine import plain_caches
from twoends.bench.replay_policies import belady_hits, lfu_hits, lru_hits, s3fifo_hits

ALL = (lru_hits, lfu_hits, s3fifo_hits, belady_hits)
PROPERTY = settings(max_examples=60, deadline=None)
requests_of = st.lists(st.integers(0, 12), min_size=1, max_size=120)


@pytest.mark.parametrize(
    ("policy", "requests", "slots", "hits"),
    [
        # a b c fill three slots; d takes a's; a takes b's; b takes c's; c takes d's.
        (lru_hits, "abcdabc", 3, 0),
        # d takes the place of c, which is needed last; then a and b hit, c misses.
        (belady_hits, "abcdabc", 3, 2),
        (lru_hits, "abacab", 2, 2),
        # c is placed for b (needed later than a); a hits twice, b misses once more.
        (belady_hits, "abacab", 2, 2),
        # a was used three times when d comes: b, the older of the once used, gives way to it.
        (lfu_hits, "aaabcdab", 3, 3),
        (lfu_hits, "aaabcdac", 3, 4),
        # One slot in ten is small: a and b pass through it, c alone was used again there.
        (s3fifo_hits, "aa", 2, 1),
        # a left the small queue; asked for again while its name is known, it enters main and stays.
        (s3fifo_hits, "abacada", 2, 2),
        (s3fifo_hits, "abcabc", 2, 0),
        (lru_hits, "aaaa", 1, 3),
    ],
)
def test_a_trace_followed_by_hand(policy, requests, slots, hits):
    assert policy(requests, slots) == hits


@given(requests=requests_of, slots=st.integers(1, 9))
@PROPERTY
def test_no_policy_beats_the_one_that_knows_the_future(requests, slots):
    best = belady_hits(requests, slots)
    assert all(policy(requests, slots) <= best for policy in ALL)


@given(requests=requests_of, slots=st.integers(1, 9))
@PROPERTY
def test_belady_is_the_plain_search_for_the_farthest_use(requests, slots):
    assert belady_hits(requests, slots) == plain_caches.belady_hits(requests, slots)


@given(requests=requests_of, slots=st.integers(1, 9))
@PROPERTY
def test_lru_is_the_plain_list_in_order_of_use(requests, slots):
    assert lru_hits(requests, slots) == sum(plain_caches.lru_hits([[r] for r in requests], slots))


@pytest.mark.parametrize("policy", ALL)
@given(requests=requests_of)
@PROPERTY
def test_with_room_for_all_only_first_uses_miss(policy, requests):
    assert policy(requests, 14) == len(requests) - len(set(requests))
