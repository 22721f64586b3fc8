"""The order of use: every trunk byte of a checkpoint in exactly one panel, whatever the panel size."""

from __future__ import annotations

from collections import Counter

import pytest

from twoends.checkpoint.predicted import predicted_index
from twoends.checkpoint.presets import preset_config
from twoends.engine.arena import PAGE
from twoends.engine.layout import MatrixEntry, largest_panel, pass_bytes, trunk_entries
from twoends.model.weights import VECTORS

MODELS = [("nano", "kimi-k3"), ("nano", "kimi-linear"), ("mini", "kimi-k3"), ("mini", "kimi-linear")]
PANEL_BYTES = [1, 5000, 64 * 1024, 1 << 20, 1 << 62]


@pytest.fixture(scope="module", params=MODELS, ids=lambda m: "-".join(m))
def model(request, tmp_path_factory):
    preset, family = request.param
    config = preset_config(preset, family=family)
    return config, predicted_index(tmp_path_factory.mktemp("nowhere"), config)


def skip_a_panel_for_every_row(config, panel_bytes):
    if panel_bytes < 5000 and config.hidden_size > 1000:
        pytest.skip("a row a panel: hundreds of thousands of panels, and nano has that case")


@pytest.mark.parametrize("panel_bytes", PANEL_BYTES)
def test_panels_cover_every_trunk_tensor_once(model, panel_bytes):
    config, index = model
    skip_a_panel_for_every_row(config, panel_bytes)
    entries = trunk_entries(config, index, panel_bytes=panel_bytes)
    covered = Counter()
    for entry in entries:
        if isinstance(entry, MatrixEntry):
            rows = 0
            for k in range(entry.num_panels):
                panel = entry.panel(k)
                assert panel.first_row == rows
                assert panel.rows > 0
                rows += panel.rows
                covered[entry.layer, entry.name] += panel.ranges[0].num_bytes
            assert rows == entry.rows
        else:
            for name, ref in entry.refs:
                covered[entry.layer, name] += ref.segment.nbytes
    expected = {}
    for layer in range(config.num_layers + 1):
        top = layer == config.num_layers
        for name, ref in index.tensors(None if top else layer).items():
            expected[layer, name] = ref.segment.nbytes
    del expected[config.num_layers, "embed"]
    assert covered == expected
    assert sum(covered.values()) == index.trunk_bytes


@pytest.mark.parametrize("panel_bytes", PANEL_BYTES)
def test_pass_bytes_is_the_sum_of_all_rooms(model, panel_bytes):
    config, index = model
    skip_a_panel_for_every_row(config, panel_bytes)
    entries = trunk_entries(config, index, panel_bytes=panel_bytes)
    rooms = [entry.panel(k).room for entry in entries for k in range(entry.num_panels)]
    assert pass_bytes(entries) == sum(rooms)
    # The first panel of an entry stands for the others; they may begin within a page, and need one more.
    assert max(rooms) - PAGE <= largest_panel(entries) <= max(rooms)


@pytest.mark.parametrize("panel_bytes", PANEL_BYTES[2:])
def test_panels_keep_to_their_size_but_for_one_head_or_row(model, panel_bytes):
    config, index = model
    for entry in trunk_entries(config, index, panel_bytes=panel_bytes):
        if isinstance(entry, MatrixEntry):
            group = config.nope_dim + config.value_dim if entry.name == "kv_b_proj" else 1
            row_bytes = entry.ref.segment.nbytes // entry.rows
            most = max(panel_bytes, group * row_bytes)
            assert entry.rows_per_panel % group == 0
            assert entry.panel(0).ranges[0].num_bytes <= most


def test_small_tensors_come_first_in_every_layer(model):
    config, index = model
    entries = trunk_entries(config, index, panel_bytes=1 << 20)
    firsts = {}
    for entry in entries:
        firsts.setdefault(entry.layer, entry.name)
    assert list(firsts) == list(range(config.num_layers + 1))
    assert set(firsts.values()) == {VECTORS}
