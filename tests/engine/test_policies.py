"""Policies by themselves: whose slot is given up, against plain rules written here."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.plain_caches import belady_hits, lru_hits
from twoends.engine.policies import make_policy, transit_slots

NUM_LAYERS, NUM_EXPERTS, FIRST_LAYER = 3, 9, 1
PROPERTY = settings(max_examples=40, deadline=None)


class Cache:
    """The least that a policy needs around it: which key is in which slot, and which are busy."""

    def __init__(self, name: str, num_slots: int, *, num_layers=NUM_LAYERS, num_experts=NUM_EXPERTS) -> None:
        self.policy = make_policy(
            name, num_slots, first_layer=FIRST_LAYER, num_layers=num_layers, num_experts=num_experts
        )
        self.num_slots = num_slots
        self.slots: dict[int, tuple[int, int]] = {}
        self.served: list[tuple[int, int]] = []
        self.hits: list[bool] = []

    def route(self, layer: int, experts: list[int]) -> None:
        """One token's experts of one layer, hits first, at most as many busy as there are slots."""
        self.policy.observe(layer, np.array([experts], np.int32))
        here = {key: slot for slot, key in self.slots.items()}
        order = [(layer, e) for e in experts if (layer, e) in here]
        order += [(layer, e) for e in experts if (layer, e) not in here]
        busy: list[int] = []
        for key in order:
            if len(busy) == self.num_slots:
                busy.pop(0)
            slot = next((s for s, k in self.slots.items() if k == key), None)
            self.served.append(key)
            self.hits.append(slot is not None)
            if slot is None:
                slot = self._place(key, busy)
                assert slot not in busy
                assert 0 <= slot < self.num_slots
                self.slots[slot] = key
            else:
                self.policy.touch(key, slot)
            busy.append(slot)

    def _place(self, key: tuple[int, int], busy: list[int]) -> int:
        """A slot, if need be after the oldest uses have ended; the pass can always go on."""
        slot = self.policy.place(key, busy.__contains__)
        while slot is None:
            assert busy, "with nothing busy there must be a slot"
            busy.pop(0)
            slot = self.policy.place(key, busy.__contains__)
        return slot


def choices(*, most: int):
    """Tokens: per token and layer some distinct experts, best first."""
    one = st.lists(st.integers(0, NUM_EXPERTS - 1), min_size=1, max_size=most, unique=True)
    return st.lists(st.tuples(*[one] * NUM_LAYERS), min_size=1, max_size=25)


def run(name: str, num_slots: int, tokens) -> Cache:
    cache = Cache(name, num_slots)
    for token in tokens:
        for i, experts in enumerate(token):
            cache.route(FIRST_LAYER + i, list(experts))
    return cache


@pytest.mark.parametrize("name", ["lru", "decayed"])
@given(num_slots=st.integers(1, 30), tokens=choices(most=6))
@PROPERTY
def test_a_slot_is_always_found_never_a_busy_one_and_no_hit_is_made_up(name, num_slots, tokens):
    """`Cache.route` checks each placement; the future-knowing policy bounds the hits."""
    cache = run(name, num_slots, tokens)
    assert len(cache.slots) <= num_slots
    assert sum(cache.hits) <= belady_hits(cache.served, num_slots)


@given(num_slots=st.integers(4, 30), tokens=choices(most=4))
@PROPERTY
def test_lru_is_the_plain_list_in_order_of_use(num_slots, tokens):
    cache = run("lru", num_slots, tokens)
    passes = [[(FIRST_LAYER + i, e) for e in experts] for token in tokens for i, experts in enumerate(token)]
    assert cache.hits == lru_hits(passes, num_slots)


@pytest.mark.parametrize("share", [0.4, 0.6, 0.9])
def test_below_one_cycle_lru_hits_nothing_and_decayed_does(share):
    """A text that repeats its choices: the very case in which the oldest is always needed next."""
    num_layers, top_k = 12, 4
    num_slots = int(share * num_layers * top_k)
    hits = {}
    for name in ("lru", "decayed"):
        cache = Cache(name, num_slots, num_layers=num_layers, num_experts=16)
        for _ in range(20):
            for layer in range(num_layers):
                cache.route(FIRST_LAYER + layer, [3, 1, 4, 15])
        hits[name] = sum(cache.hits)
    assert hits["lru"] == 0
    # All but the first token can hit on what is kept: the slots without those in transit.
    assert hits["decayed"] >= 19 * (num_slots - transit_slots(num_slots, 0))


@pytest.mark.parametrize("name", ["lru", "decayed"])
def test_what_another_layer_still_uses_is_not_given_up(name):
    """All hits of one layer, then misses of the next one while the first is not finished."""
    cache = Cache(name, 8)
    for _ in range(3):
        cache.route(FIRST_LAYER, [0, 1, 2, 3])
    policy = cache.policy
    policy.observe(FIRST_LAYER, np.array([[0, 1, 2, 3]], np.int32))
    busy = {slot for slot, (layer, _) in cache.slots.items() if layer == FIRST_LAYER}
    for slot in busy:
        policy.touch(cache.slots[slot], slot)
    for _ in range(5):
        policy.observe(FIRST_LAYER + 1, np.array([[4, 5, 6, 7]], np.int32))
    given = [policy.place((FIRST_LAYER + 1, expert), busy.__contains__) for expert in range(4, 8)]
    assert not busy & set(given)


def test_decayed_keeps_the_often_chosen_and_lets_strangers_pass_through():
    cache = Cache("decayed", 2 + NUM_LAYERS)
    rng = np.random.default_rng(0)
    for _ in range(30):
        for layer in range(FIRST_LAYER, FIRST_LAYER + NUM_LAYERS):
            cache.route(layer, [7, int(rng.integers(0, 7))])
    kept = set(cache.slots.values())
    assert {(FIRST_LAYER + i, 7) for i in range(NUM_LAYERS)} <= kept


@pytest.mark.parametrize(("ids", "takes_over"), [([2, 8], True), ([8, 2], False)])
def test_the_first_ranked_expert_outweighs_the_last(ids, takes_over):
    """Both are chosen every token, and one slot is more than transit: 8 has it, 2 may take it."""
    policy = OneLayer(ranked=True)
    policy.observe(FIRST_LAYER, np.array([ids], np.int32))
    assert (policy.place((FIRST_LAYER, 2), never) == policy.slot_of_8) is takes_over


def test_without_ranks_the_order_of_ids_means_nothing():
    """Equal values: the newcomer takes the slot, first or last."""
    for ids in ([2, 8], [8, 2]):
        policy = OneLayer(ranked=False)
        policy.observe(FIRST_LAYER, np.array([ids], np.int32))
        assert policy.place((FIRST_LAYER, 2), never) == policy.slot_of_8


class OneLayer:
    """A policy over three slots (two are for transit) whose free one went to expert 8."""

    def __init__(self, *, ranked: bool) -> None:
        self._policy = make_policy(
            "decayed", 3, first_layer=FIRST_LAYER, num_layers=1, num_experts=9, ranked=ranked
        )
        self.observe, self.place = self._policy.observe, self._policy.place
        self.observe(FIRST_LAYER, np.array([[8, 2]], np.int32))
        self.slot_of_8 = self.place((FIRST_LAYER, 8), never)


def never(slot):
    return False


def test_a_slot_that_was_busy_when_its_layer_was_looked_at_is_seen_again_when_it_is_not():
    """Layer 2 keeps one expert, busy while layer 2 ran; for layer 3's better one it must give way."""
    policy = make_policy("decayed", 3, first_layer=FIRST_LAYER, num_layers=3, num_experts=9)
    first, second = FIRST_LAYER, FIRST_LAYER + 1
    policy.observe(first, np.array([[0, 1, 2]], np.int32))
    kept = policy.place((first, 2), never)
    policy.place((first, 0), {kept}.__contains__)
    policy.observe(second, np.array([[5, 6, 7]], np.int32))
    assert policy.place((second, 5), never) == kept


def test_a_busy_slot_of_another_layer_is_never_given_up():
    policy = make_policy("decayed", 3, first_layer=FIRST_LAYER, num_layers=3, num_experts=9)
    policy.observe(FIRST_LAYER, np.array([[0, 1, 2]], np.int32))
    kept = policy.place((FIRST_LAYER, 2), never)
    policy.observe(FIRST_LAYER + 1, np.array([[5, 6, 7]], np.int32))
    assert policy.place((FIRST_LAYER + 1, 5), {kept}.__contains__) not in (kept, None)


def test_a_share_never_exceeds_the_experts_of_a_layer_and_the_rest_is_in_transit():
    cache = Cache("decayed", 40)
    rng = np.random.default_rng(1)
    for _ in range(60):
        for layer in range(FIRST_LAYER, FIRST_LAYER + NUM_LAYERS):
            cache.route(layer, rng.permutation(NUM_EXPERTS)[:5].tolist())
    # 27 experts in 40 slots: after each was seen once nothing is missed again.
    assert not any(cache.hits[:3])
    assert len(set(cache.slots.values())) == NUM_LAYERS * NUM_EXPERTS == sum(not hit for hit in cache.hits)


@pytest.mark.parametrize("name", ["lru", "decayed"])
def test_a_model_without_experts_needs_no_slot(name):
    policy = make_policy(name, 0, first_layer=2, num_layers=0, num_experts=0)
    assert policy.name == name


@pytest.mark.parametrize(
    ("num_slots", "choice", "transit"),
    [
        (1, 8, 1),
        (4, 8, 2),
        (16, 12, 8),
        (48, 12, 24),
        (49, 12, 4),
        (103, 8, 8),
        (368, 16, 8),
        (9000, 16, 8),
        (52, 0, 4),
        (23, 0, 2),
    ],
)
def test_few_slots_let_half_pass_and_many_a_small_share(num_slots, choice, transit):
    assert transit_slots(num_slots, choice) == transit


def test_the_misses_of_one_choice_can_be_read_side_by_side():
    """With slots for hardly more than one choice, none of its reads has to wait for another's end."""
    policy = make_policy("decayed", 16, first_layer=0, num_layers=2, num_experts=64, choice=8)
    for token in range(6):
        for layer in (0, 1):
            ids = [8 * (token % 3) + i for i in range(8)]
            policy.observe(layer, np.array([ids], np.int32))
            busy: set[int] = set()
            for expert in ids:
                slot = policy.place((layer, expert), busy.__contains__)
                assert slot is not None
                busy.add(slot)
