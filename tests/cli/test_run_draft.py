"""`twoends run --draft-model` with a draft layer: used, planned, reported, and refused for another model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.draft_layers import write_random
from twoends.checkpoint import shipped
from twoends.engine.open import Checkpoint

WORDS = ("--ids", "5,17,300,42,63,0,17,9", "-n", "12", "--threads", "1", "--json")


@pytest.fixture
def draft(nano, tmp_path):
    write_random(Checkpoint.open(nano), tmp_path / "layer")
    return tmp_path / "layer"


def test_a_layer_drafts_and_the_text_stays(twoends, nano, draft, monkeypatch):
    # The program of a test is large and grows; without it a budget is what streams and what doesn't.
    monkeypatch.setattr("twoends.engine.open.counted_bytes", lambda: 0)
    monkeypatch.setattr("twoends.cli.run_model.peak_resident_bytes", lambda: 0)
    plain = json.loads(twoends("run", nano, *WORDS).out)
    floor = json.loads(twoends("run", nano, *WORDS, "--draft-model", draft).out)["plan"]["floor_bytes"]
    result = twoends("run", nano, *WORDS, "--draft-model", draft, "--ram", floor + 100_000)
    assert result.code == 0, result.err
    found = json.loads(result.out)
    assert [found[key] for key in ("ids", "logits_digest")] == [
        plain[key] for key in ("ids", "logits_digest")
    ]
    tally = found["drafts"]["model"]
    assert tally["drafted"] >= tally["tried"][0] > 0
    assert found["draft_model"]["model"] == str(draft)
    assert found["draft_model"]["bytes_read"] > 100_000
    assert "draft layer" in [row["name"] for row in found["plan"]["rows"]]


def test_a_layer_of_another_model_is_refused_before_a_weight_is_read(twoends, nano_dirs, draft):
    result = twoends("run", nano_dirs["kimi-linear"], *WORDS, "--draft-model", draft)
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("twoends: the draft layer was made for another model than nano.\n")
    assert "digest of the config" in result.err
    assert "twoends train --draft-of nano" in result.err


def test_a_damaged_layer_is_refused_with_code_2(twoends, nano, draft):
    path = draft / "draft.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    result = twoends("run", nano, *WORDS, "--draft-model", draft)
    assert result.code == 2
    assert result.err.startswith("twoends: draft.safetensors ends 1 bytes early;")


def test_a_layer_and_no_drafts_is_refused(twoends, nano, draft):
    result = twoends("run", nano, *WORDS, "--draft-model", draft, "--draft", "0")
    assert result.code == 2
    assert "--draft-model is there to guess" in result.err


def test_the_name_of_the_shipped_layer_stands_for_its_place(twoends, nano, draft, monkeypatch):
    monkeypatch.setattr("twoends.cli.run_draft.shipped_draft", lambda: draft)
    found = json.loads(twoends("run", nano, *WORDS, "--draft-model", shipped.SHIPPED_DRAFT).out)
    assert found["draft_model"]["model"] == str(draft)


def test_a_shipped_layer_that_is_not_installed_is_named(twoends, nano, monkeypatch, tmp_path):
    monkeypatch.setattr(shipped, "__file__", str(tmp_path / "twoends" / "checkpoint" / "shipped.py"))
    result = twoends("run", nano, *WORDS, "--draft-model", shipped.SHIPPED_DRAFT)
    assert result.code == 2
    assert result.err.startswith("twoends: the draft nano-draft is not in this installation.\n")


def test_the_shipped_layer_drafts_for_the_shipped_model(twoends, monkeypatch):
    """Rows are kept, the text stays."""
    place = Path(shipped.__file__).parents[1] / "assets" / shipped.SHIPPED_DRAFT
    if not (place / "config.json").is_file():
        pytest.skip(f"no draft layer in {place}")
    monkeypatch.setattr("twoends.engine.open.counted_bytes", lambda: 0)
    monkeypatch.setattr("twoends.cli.run_model.peak_resident_bytes", lambda: 0)
    words = ("run", "Once upon a time", "-n", "60", "--threads", "1", "--json")
    plain = json.loads(twoends(*words).out)
    drafting = (*words, "--draft-model", shipped.SHIPPED_DRAFT)
    floor = json.loads(twoends(*drafting).out)["plan"]["floor_bytes"]
    found = json.loads(twoends(*drafting, "--ram", floor + 300_000).out)
    assert [found[key] for key in ("ids", "logits_digest")] == [
        plain[key] for key in ("ids", "logits_digest")
    ]
    tally = found["drafts"]["model"]
    assert tally["accepted"] > 0.2 * tally["drafted"] > 5
