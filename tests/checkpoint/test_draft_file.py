"""A draft layer's folder: read back as written, and refused for anything that is not as it should be."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.support.draft_layers import bf16_bits, config_of, random_tensors, write_random
from twoends.checkpoint.draft_config import (
    draft_specs,
    is_draft_layer,
    read_draft_config,
    refuse_other_target,
    tokenizer_digest,
)
from twoends.checkpoint.draft_file import DraftFile, write_draft
from twoends.errors import CheckpointError, ConfigError, OptionError

FAMILIES = ("kimi-k3", "kimi-linear")


@pytest.fixture
def checkpoint(nano_checkpoints):
    return nano_checkpoints["kimi-k3"]


@pytest.fixture
def draft(checkpoint, tmp_path):
    """A folder that a test may damage."""
    write_random(checkpoint, tmp_path / "draft")
    return tmp_path / "draft"


def change(draft, **fields):
    path = draft / "config.json"
    raw = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({key: value for key, value in raw.items() if value != "gone"}))


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_written_is_read_back(nano_checkpoints, tmp_path, family):
    checkpoint = nano_checkpoints[family]
    file = write_random(checkpoint, tmp_path / "draft", seed=4)
    assert is_draft_layer(tmp_path / "draft")
    assert not is_draft_layer(checkpoint.directory)
    assert file.config == config_of(checkpoint)
    tensors, found = random_tensors(checkpoint, file.config, seed=4), file.read()
    for spec in draft_specs(file.config, checkpoint.config):
        wanted = tensors[spec.file_name]
        if spec.released == "F32":
            np.testing.assert_array_equal(found.vectors[spec.short], wanted)
        else:
            matrix = found.matrices[spec.short]
            assert (matrix.format, matrix.rows, matrix.cols) == ("bf16", *wanted.shape)
            np.testing.assert_array_equal(matrix.data.view(np.uint16), wanted.reshape(-1))


@pytest.mark.parametrize(
    ("fields", "message", "evidence"),
    [
        ({"feature": 1}, "has unknown fields", "nearest: features"),
        ({"mlp_width": "gone"}, "misses fields", "mlp_width"),
        ({"format": "twoends-draft-2"}, "a wrong 'format'", "twoends-draft-1"),
        ({"features": []}, "a wrong 'features'", "block.N"),
        ({"features": ["final", "final"]}, "a wrong 'features'", "distinct"),
        ({"features": ["block.01"]}, "a wrong 'features'", "block.01"),
        ({"mlp_width": 0}, "a wrong 'mlp_width'", "at least 1"),
        ({"mlp_width": 2.0}, "a wrong 'mlp_width'", "2.0"),
        ({"unrolled_steps": True}, "a wrong 'unrolled_steps'", "True"),
        ({"target_config": "E9"}, "a wrong 'target_config'", "32 hex digits"),
        ({"target": None}, "a wrong 'target'", "a word"),
    ],
    ids=str,
)
def test_a_config_with_a_wrong_field_is_refused_with_its_name(draft, fields, message, evidence):
    change(draft, **fields)
    with pytest.raises(ConfigError, match=message) as error:
        read_draft_config(draft)
    assert evidence in str(error.value)
    assert error.value.exit_code == 2


def test_a_config_that_is_not_there_or_no_json_is_refused(draft):
    (draft / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="is not JSON"):
        read_draft_config(draft)
    (draft / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="one JSON object"):
        read_draft_config(draft)
    (draft / "config.json").unlink()
    with pytest.raises(ConfigError, match="can't be read: No such file"):
        read_draft_config(draft)


def refuse(config, checkpoint, **changes):
    given = {
        "target_name": "this",
        "draft_name": "that",
        "tokenizer": tokenizer_digest(checkpoint.directory),
    } | changes
    refuse_other_target(config, checkpoint.config, **given)


def test_its_own_target_is_taken_and_one_without_a_tokenizer_too(checkpoint):
    refuse(config_of(checkpoint), checkpoint)
    refuse(config_of(checkpoint), checkpoint, tokenizer=None)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"hidden_size": 64}, "hidden size"),
        ({"vocab_size": 9}, "size of the vocabulary"),
        ({"target_config": "0" * 32}, "digest of the config"),
        ({"target_tokenizer": "0" * 32}, "digest of the tokenizer"),
    ],
)
def test_another_target_is_refused_with_what_differs(checkpoint, changes, what):
    with pytest.raises(OptionError, match="that was made for another model than this") as error:
        refuse(config_of(checkpoint, **changes), checkpoint)
    assert [row[0] for row in error.value.evidence] == ["made for", what]


def test_a_block_that_the_target_has_not_is_refused(nano_checkpoints):
    for family, count in (("kimi-k3", 3), ("kimi-linear", 0)):
        checkpoint = nano_checkpoints[family]
        with pytest.raises(OptionError, match=rf"reads block\.3; this has {count} blocks"):
            refuse(config_of(checkpoint, features=("block.3",)), checkpoint)


def test_a_layer_of_another_shape_is_refused_with_both(draft, checkpoint):
    change(draft, mlp_width=49)
    with pytest.raises(
        CheckpointError, match=r"not the draft layer that its config describes: mlp\.down"
    ) as error:
        DraftFile.open(draft, checkpoint.config)
    rows = {row[0]: row[1] for row in error.value.evidence}
    assert rows["expected"].endswith(", 49]")
    assert rows["found"].endswith(", 48]")


def test_a_file_that_ends_early_is_refused(draft, checkpoint):
    path = draft / "draft.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="ends 100 bytes early"):
        DraftFile.open(draft, checkpoint.config)


@pytest.mark.parametrize("name", ["eh_proj.weight", "norm.weight"])
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_a_value_that_is_not_finite_is_neither_written_nor_read(checkpoint, tmp_path, name, value):
    config = config_of(checkpoint)
    tensors = random_tensors(checkpoint, config, seed=1)
    good = {key: array.copy() for key, array in tensors.items()}
    wrong = np.float32(value) if tensors[name].ndim == 1 else bf16_bits(np.full(1, value))[0]
    tensors[name].reshape(-1)[5] = wrong
    with pytest.raises(CheckpointError, match=rf"{name} of draft\.safetensors holds a value that isn't"):
        write_draft(tmp_path / "d", config, checkpoint.config, tensors=tensors, card="")
    write_draft(tmp_path / "d", config, checkpoint.config, tensors=good, card="")
    file = DraftFile.open(tmp_path / "d", checkpoint.config)
    begin = int(file.header.begins[file.header.names.index(name)])
    data = bytearray(file.header.path.read_bytes())
    data[begin + 5 * wrong.nbytes : begin + 6 * wrong.nbytes] = wrong.tobytes()
    file.header.path.write_bytes(data)
    with pytest.raises(CheckpointError, match="a value that isn't finite") as error:
        file.read()
    assert error.value.evidence[1][1].startswith("value 5 of ")


def test_a_tensor_too_few_or_too_many_is_not_written(checkpoint, tmp_path):
    config = config_of(checkpoint)
    tensors = random_tensors(checkpoint, config, seed=1)
    extra = tensors | {"zero.weight": np.zeros(3, np.float32)}
    with pytest.raises(CheckpointError, match=r"zero\.weight"):
        write_draft(tmp_path, config, checkpoint.config, tensors=extra, card="")
    del tensors["fc.weight"]
    with pytest.raises(CheckpointError, match=r"fc\.weight"):
        write_draft(tmp_path, config, checkpoint.config, tensors=tensors, card="")
