"""The state of a sequence: its size is what the plan says, all of it is touched, and unused room is NaN."""

from __future__ import annotations

import numpy as np
import pytest

from twoends.checkpoint.presets import preset_config
from twoends.model.state import MlaState, SequenceState, cache_bytes_per_token, recurrent_bytes

FAMILIES = ("kimi-k3", "kimi-linear")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("capacity", [1, 37, 1000])
def test_a_state_takes_the_bytes_that_a_plan_counts(family, capacity):
    config = preset_config("nano", family=family)
    state = SequenceState(config, capacity)
    assert state.num_bytes == recurrent_bytes(config) + capacity * cache_bytes_per_token(config)


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_came_before_the_first_token_and_later_rows_are_poisoned(family):
    state = SequenceState(preset_config("nano", family=family), 5)
    assert state.position == 0
    for layer in state.layers:
        if isinstance(layer, MlaState):
            assert np.isnan(layer.cache_CM).all()
        else:
            tails = (layer.q_tail_3P, layer.k_tail_3P, layer.v_tail_3P)
            assert not any(array.any() for array in (layer.state_HKV, *tails))


def test_only_rows_in_use_are_saved_and_names_tell_the_layers():
    config = preset_config("nano")
    state = SequenceState(config, 9)
    state.position = 4
    arrays = dict(state.arrays())
    caches = {name for name, array in arrays.items() if name.endswith(".cache") and array.shape[0] == 4}
    assert caches == {f"{layer}.cache" for layer in config.mla_layers}
    assert len(arrays) == len(config.mla_layers) + 4 * (config.num_layers - len(config.mla_layers))


def test_saved_arrays_are_views_so_that_a_restored_byte_is_in_the_state():
    state = SequenceState(preset_config("nano"), 3)
    state.position = 3
    for _, array in state.arrays():
        array[...] = 7
    assert all((array == 7).all() for _, array in state.arrays())
