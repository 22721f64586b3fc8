"""Headers of single files: what the format allows is read, all else is refused with its numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.checkpoint.handmade_shards import header_bytes, write_shard
from twoends.checkpoint.safetensors import read_header
from twoends.errors import CheckpointError

A = "model.layers.7.self_attn.a.weight"
B = "model.layers.7.self_attn.b.weight"


def entries(**changes: Any) -> dict[str, Any]:
    """Two tensors of 24 and 16 bytes; `changes` go into the second."""
    return {
        A: {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        B: {"dtype": "BF16", "shape": [8], "data_offsets": [24, 40], **changes},
    }


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    text = str(caught.value)
    assert path.name in text
    return text


def test_a_sound_header_is_read_with_absolute_offsets(tmp_path: Path) -> None:
    path = write_shard(tmp_path / "a.safetensors", {"__metadata__": {"format": "pt"}, **entries()})
    header = read_header(path)
    start = path.stat().st_size - 40
    assert header.names == (A, B)
    assert header.dtypes == ("F32", "BF16")
    assert header.shapes == ((2, 3), (8,))
    assert header.begins.tolist() == [start, start + 24]
    assert header.ends.tolist() == [start + 24, start + 40]
    assert (header.data_start, header.payload_bytes) == (start, 40)


def test_tensors_are_given_in_the_order_of_their_bytes(tmp_path: Path) -> None:
    backwards = dict(reversed(entries().items()))
    assert read_header(write_shard(tmp_path / "a.safetensors", backwards)).names == (A, B)


@pytest.mark.parametrize("num_bytes", [0, 1, 7])
def test_a_file_too_short_for_a_length_is_refused(tmp_path: Path, num_bytes: int) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(b"\1" * num_bytes)
    assert f"found      {num_bytes} bytes" in refusal(path)


@pytest.mark.parametrize("length", [0, 1, 33, 100_000_001, 2**63, 2**64 - 1])
def test_an_absurd_header_length_is_refused(tmp_path: Path, length: int) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + b"{" + b" " * 31)
    assert f"states a header of {length:,} bytes" in refusal(path)


def test_a_header_over_the_limit_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    with path.open("wb") as file:
        file.write((100_000_001).to_bytes(8, "little") + b"{")
        file.truncate(300_000_000)
    assert "at most 100,000,000 bytes" in refusal(path)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b'{"a": ', "is not valid"),
        (b" {}", "not with an opening brace"),
        (b"[1, 2]", "not with an opening brace"),
        (b"{}", "it names no tensor"),
        (b'{"__metadata__": {}}', "it names no tensor"),
        (b'{"__metadata__": {"a": 1}}', "__metadata__ must hold words only"),
        (b'{"a": 1, "a": 2}', "'a' appears twice"),
        (b'{"\xff": 1}', "is not valid"),
        (b'{"a":' * 50_000, "is not valid"),
    ],
    ids=["cut", "space first", "list", "empty", "only metadata", "numbers", "twice", "not utf-8", "deep"],
)
def test_a_header_that_is_not_such_json_is_refused(tmp_path: Path, text: bytes, reason: str) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    assert reason in refusal(path)


def test_a_tensor_named_twice_is_refused(tmp_path: Path) -> None:
    one = json.dumps(entries()[A])
    text = f'{{"{A}": {one}, "{A}": {one}}}'.encode()
    path = tmp_path / "a.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(24))
    assert f"'{A}' appears twice" in refusal(path)


@pytest.mark.parametrize(
    ("changes", "expected", "found"),
    [
        ({"dtype": "Q4"}, "a dtype among", "'Q4'"),
        ({"dtype": 3}, "a dtype among", "3"),
        ({"shape": [2.0, 4]}, "a shape of whole numbers", "[2.0, 4]"),
        ({"shape": [True, 8]}, "a shape of whole numbers", "[True, 8]"),
        ({"shape": [-2, -4]}, "a shape of whole numbers", "[-2, -4]"),
        ({"shape": "8"}, "a shape of whole numbers", "'8'"),
        ({"shape": [9]}, "18 bytes (BF16 [9])", "16 bytes"),
        ({"dtype": "F32"}, "32 bytes (F32 [8])", "16 bytes"),
        ({"data_offsets": [40, 24]}, "two rising data offsets", "[40, 24]"),
        ({"data_offsets": [-16, 0]}, "two rising data offsets", "[-16, 0]"),
        ({"data_offsets": [24]}, "two rising data offsets", "[24]"),
        ({"data_offsets": [24.0, 40]}, "two rising data offsets", "[24.0, 40]"),
        ({"data_offsets": [2**70, 2**70 + 16]}, "two rising data offsets", "1180591620717411303424"),
        ({"extra": 1}, "dtype, shape, data_offsets", "data_offsets, dtype, extra, shape"),
    ],
)  # fmt: skip
def test_a_wrong_entry_is_refused_with_layer_expected_and_found(
    tmp_path: Path, changes: dict[str, Any], expected: str, found: str
) -> None:
    path = write_shard(tmp_path / "a.safetensors", entries(**changes), payload=40)
    lines = refusal(path).splitlines()
    assert B in lines[0]
    assert any(line.split() == ["layer", "7"] for line in lines)
    assert any("expected" in line and expected in line for line in lines)
    assert any("found" in line and found in line for line in lines)


@pytest.mark.parametrize("missing", ["dtype", "shape", "data_offsets"])
def test_an_entry_without_a_field_is_refused(tmp_path: Path, missing: str) -> None:
    wrong = entries()
    del wrong[B][missing]
    assert "dtype, shape, data_offsets" in refusal(write_shard(tmp_path / "a.safetensors", wrong, payload=40))


def test_overlapping_tensors_are_refused(tmp_path: Path) -> None:
    path = write_shard(tmp_path / "a.safetensors", entries(data_offsets=[20, 36]), payload=36)
    text = refusal(path)
    assert "overlap" in text
    assert f"20, 4 bytes inside it" in text  # noqa: F541
    assert B in text


def test_a_hole_between_tensors_is_refused(tmp_path: Path) -> None:
    path = write_shard(tmp_path / "a.safetensors", entries(data_offsets=[32, 48]), payload=48)
    assert "leave a hole" in refusal(path)


def test_data_that_does_not_begin_at_zero_is_refused(tmp_path: Path) -> None:
    moved = {A: {"dtype": "U8", "shape": [4], "data_offsets": [4, 8]}}
    assert "(start of the data)" in refusal(write_shard(tmp_path / "a.safetensors", moved))


@pytest.mark.parametrize(("cut", "first"), [(1, B), (16, B), (17, A), (40, A)])
def test_a_short_file_is_refused_with_its_missing_bytes(tmp_path: Path, cut: int, first: str) -> None:
    path = write_shard(tmp_path / "a.safetensors", entries(), payload=40 - cut)
    text = refusal(path)
    assert text.startswith(f"a.safetensors ends {cut} bytes early; part of layer 7 is missing.")
    assert text.count("first tensor not whole") == 1
    assert first in text


def test_a_file_that_goes_on_after_its_tensors_is_refused(tmp_path: Path) -> None:
    path = write_shard(tmp_path / "a.safetensors", entries(), payload=41)
    assert "has 1 bytes after its last tensor" in refusal(path)


def test_a_file_that_can_not_be_opened_is_refused(tmp_path: Path) -> None:
    assert "can't be read" in refusal(tmp_path / "absent.safetensors")


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.integers(0, 10_000), flip=st.integers(1, 255))
def test_a_flipped_header_byte_never_passes_as_another_layout(tmp_path: Path, place: int, flip: int) -> None:
    sound = header_bytes(entries()) + bytes(40)
    data = bytearray(sound)
    data[place % (len(sound) - 40)] ^= flip
    path = tmp_path / "a.safetensors"
    path.write_bytes(data)
    try:
        header = read_header(path)
    except CheckpointError:
        return
    # What still parses differs in a name or in a shape or dtype of the same size, which the index catches.
    spans = header.begins.tolist(), header.ends.tolist()
    assert np.array_equal(spans, ([len(sound) - 40, len(sound) - 16], [len(sound) - 16, len(sound)]))


def test_the_safetensors_library_reads_the_same(tmp_path: Path, nano_kimi_linear: Path) -> None:
    library = pytest.importorskip("safetensors", reason="the safetensors library is not installed")
    (path,) = nano_kimi_linear.glob("*.safetensors")
    header = read_header(path)
    with library.safe_open(path, framework="np") as file:
        assert sorted(file.keys()) == sorted(header.names)
        for name, shape in zip(header.names, header.shapes, strict=True):
            assert tuple(file.get_slice(name).get_shape()) == shape
