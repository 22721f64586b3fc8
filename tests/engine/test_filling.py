"""Where every expert has a slot, all are read before they are asked for: once, whole, not in the way."""

from __future__ import annotations

import time

import pytest
from hypothesis import given

from tests.engine.test_experts import (
    FAMILIES,
    SHARED,
    Slots,
    file_bytes,
    passes_of_rows,
    read_size,
    truths,
)
from tests.support.backends import native_isas
from tests.support.running import make_ops, run
from twoends.engine.files import read_at
from twoends.errors import ReadError

ISA = native_isas()[0] if native_isas() else "reference"
__all__ = ["truths"]  # a fixture


def all_keys(checkpoint):
    config = checkpoint.config
    return [(layer, expert) for layer in config.moe_layers for expert in range(config.num_experts)]


def filled(checkpoint, **more):
    slots = Slots(checkpoint, len(all_keys(checkpoint)), fills=True, **more)
    slots.slots.fill()
    return slots


def fill_up(slots, checkpoint):
    """Lets all be read, as passes of a long run would."""
    deadline = time.monotonic() + 30
    while not slots.slots._filling.is_over and time.monotonic() < deadline:
        slots.slots.fill()
        time.sleep(0.001)
    for slot in range(len(all_keys(checkpoint))):
        while not slots.slots.is_here(slot):
            assert time.monotonic() < deadline
            time.sleep(0.001)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("policy", ["lru", "decayed"])
@given(passes=passes_of_rows())
@SHARED
def test_what_is_asked_for_while_slots_fill_comes_once_with_its_bytes(
    nano_checkpoints, truths, family, policy, passes
):
    slots = filled(nano_checkpoints[family], policy=policy)
    try:
        for layer, ids_TS in passes:
            slots.run_layer(layer, ids_TS, truth=truths[family])
    finally:
        slots.reader.close()


@pytest.mark.parametrize("policy", ["lru", "decayed"])
def test_in_the_end_everything_is_a_hit_and_was_read_once(nano_checkpoints, policy):
    checkpoint = nano_checkpoints["kimi-k3"]
    slots = filled(checkpoint, policy=policy)
    fill_up(slots, checkpoint)
    for layer in checkpoint.config.moe_layers:
        slots.run_layer(layer, [[0, 3, 7, 13]])
    slots.reader.close()
    assert all(hit for _, hit in slots.served)
    assert slots.counters.bytes_experts == sum(read_size(checkpoint, key) for key in all_keys(checkpoint))


def test_few_reads_are_queued_at_once_so_that_a_demand_finds_its_own(nano_checkpoints):
    checkpoint = nano_checkpoints["kimi-k3"]

    def slow(fd, buffer, offset):
        time.sleep(0.01)
        return read_at(fd, buffer, offset)

    slots = filled(checkpoint, read=slow)
    assert 0 < len(slots.slots._where) <= 16
    slots.run_layer(1, [[0, 1, 2, 13]])
    slots.reader.close()
    assert [hit for _, hit in slots.served] == [False] * 4, "none of them can have been here"


def test_an_expert_that_nobody_asks_for_may_be_unreadable(nano_checkpoints):
    checkpoint = nano_checkpoints["kimi-k3"]
    bad = checkpoint.index.expert(2, 5)[0]

    def failing(fd, buffer, offset):
        if offset <= bad.offset < offset + len(buffer) and fd == slots.reader.files._fds[bad.path_id]:
            raise OSError(5, "Input/output error")
        return read_at(fd, buffer, offset)

    slots = Slots(checkpoint, len(all_keys(checkpoint)), fills=True, read=failing)
    fill_up(slots, checkpoint)
    readable = [
        key
        for key in all_keys(checkpoint)
        if slots.slots._slots[slots.slots._where[key]].reads[0].error is None
    ]
    assert (2, 5) not in readable
    layer, expert = readable[0]
    slots.run_layer(layer, [[expert]], truth={readable[0]: file_bytes(checkpoint, *readable[0])})
    with pytest.raises(ReadError):
        slots.run_layer(2, [[5]])
    slots.reader.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_answer_is_the_same_and_fewer_reads_are_waited_for(nano_checkpoints, family):
    plain = run(nano_checkpoints[family], ops=make_ops(ISA), num_new=12, budget="ample", look_ahead="off")
    early = run(nano_checkpoints[family], ops=make_ops(ISA), num_new=12, budget="ample", look_ahead="auto")
    assert early.digests == plain.digests
    assert early.counters.expert_requests == plain.counters.expert_requests
    assert early.counters.bytes_experts >= plain.counters.bytes_experts
