"""Sessions: what is saved comes back to the bit, or is refused by name; nothing half written stays."""

from __future__ import annotations

import errno
import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.support.opened import generate, opened
from tests.support.running import PROMPT
from twoends.engine.open import Checkpoint
from twoends.errors import DoesNotFit, SessionError
from twoends.generate import session as session_module
from twoends.generate.generator import Generator
from twoends.generate.session import read_session, restore_state, save_session
from twoends.model.state import SequenceState

FAMILIES = ("kimi-k3", "kimi-linear")
CAPACITY = 24


def filled_state(checkpoint, position=9, seed=0) -> SequenceState:
    """Random bits, NaN patterns among them: a session keeps bits, not values."""
    state = SequenceState(checkpoint.config, CAPACITY)
    state.position = position
    rng = np.random.default_rng(seed)
    for _, array in state.arrays():
        array[...] = rng.integers(0, 2**32, array.shape, np.uint32).view(np.float32)
    return state


def bits(state):
    return [(name, array.tobytes()) for name, array in state.arrays()]


@pytest.fixture
def saved_file(nano_checkpoints, tmp_path):
    """(path, checkpoint, state) of a small saved session."""
    checkpoint = nano_checkpoints["kimi-k3"]
    state = filled_state(checkpoint)
    path = tmp_path / "chat.session"
    save_session(path, checkpoint=checkpoint, ids=[*range(9), 44], state=state)
    return path, checkpoint, state


def load(path, checkpoint):
    """Everything that `--load` does with the file."""
    saved = read_session(path, checkpoint=checkpoint)
    state = SequenceState(checkpoint.config, CAPACITY)
    restore_state(saved, state)
    return saved, state


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("position", [1, 9, CAPACITY])
def test_ids_and_state_come_back_to_the_bit(nano_checkpoints, tmp_path, family, position):
    checkpoint = nano_checkpoints[family]
    state = filled_state(checkpoint, position)
    ids = list(range(position + 1))
    size = save_session(tmp_path / "s", checkpoint=checkpoint, ids=ids, state=state)
    assert size == (tmp_path / "s").stat().st_size
    saved, restored = load(tmp_path / "s", checkpoint)
    assert (saved.ids, saved.position, restored.position) == (ids, position, position)
    assert bits(restored) == bits(state)


def test_a_session_fits_into_a_larger_context_and_what_lies_beyond_stays_untouched(saved_file):
    path, checkpoint, state = saved_file
    larger = SequenceState(checkpoint.config, 100)
    restore_state(read_session(path, checkpoint=checkpoint), larger)
    assert bits(larger) == bits(state)
    layer = larger.layers[checkpoint.config.mla_layers[0]]
    assert np.isnan(layer.cache_CM[9:]).all()


def test_only_tokens_that_went_through_are_in_the_file(nano_checkpoints, tmp_path):
    """Room for later tokens is memory, not content."""
    checkpoint = nano_checkpoints["kimi-k3"]
    sizes = []
    for capacity in (10, 1000):
        state = SequenceState(checkpoint.config, capacity)
        state.position = 3
        sizes.append(save_session(tmp_path / "s", checkpoint=checkpoint, ids=[1] * 4, state=state))
    assert sizes[0] == sizes[1]


def test_saving_again_replaces_the_file_whole(saved_file):
    path, checkpoint, _ = saved_file
    other = filled_state(checkpoint, position=4, seed=1)
    save_session(path, checkpoint=checkpoint, ids=[1, 2, 3, 4, 5], state=other)
    assert bits(load(path, checkpoint)[1]) == bits(other)
    assert list(path.parent.iterdir()) == [path]


def test_another_models_session_is_refused_with_both_fingerprints(saved_file, nano_checkpoints):
    path, checkpoint, _ = saved_file
    other = nano_checkpoints["kimi-linear"]
    with pytest.raises(SessionError, match=r"chat.session was not made by this model") as caught:
        read_session(path, checkpoint=other)
    rows = dict(row[:2] for row in caught.value.evidence)
    assert rows["this model"] == other.index.fingerprint
    assert rows["session"] == checkpoint.index.fingerprint


def test_another_latent_epsilon_is_another_model(saved_file):
    path, checkpoint, _ = saved_file
    other = Checkpoint.open(checkpoint.directory, latent_eps=3e-6)
    with pytest.raises(SessionError, match="not made by this model") as caught:
        read_session(path, checkpoint=other)
    assert ("field", "latent_eps") in caught.value.evidence


def test_other_expert_activations_are_another_model(saved_file):
    path, checkpoint, _ = saved_file
    other = Checkpoint.open(checkpoint.directory, expert_activations="mxfp8")
    with pytest.raises(SessionError, match="not made by this model") as caught:
        read_session(path, checkpoint=other)
    assert ("field", "expert_activations") in [row[:2] for row in caught.value.evidence]


def within(field: bytes, plus: int):
    """The place of a byte of the header, counted from the end of a field's name."""
    return lambda data: data.index(field) + len(field) + plus


def header_end(data: bytes) -> int:
    return 16 + int.from_bytes(data[8:16], "little")


# What is hit -> where it lies in a file.
PLACES = {
    "magic": lambda data: 3,
    "length, low byte": lambda data: 8,
    "length, high byte": lambda data: 15,
    "opening brace": lambda data: 16,
    "version": within(b'"version": ', 0),
    "fingerprint": within(b'"fingerprint": "', 4),
    "a digit of the ids": within(b'"ids": [', 0),
    "the position": within(b'"position": ', 0),
    "a shape": within(b'.state", [', 0),
    "checksum of the header": lambda data: header_end(data) + 5,
    "first array": lambda data: header_end(data) + 32,
    "middle": lambda data: (header_end(data) + len(data)) // 2,
    "last array": lambda data: len(data) - 33,
    "checksum": lambda data: len(data) - 1,
}


@pytest.mark.parametrize("bit", [0, 6])
@pytest.mark.parametrize("place", list(PLACES))
def test_a_flipped_bit_anywhere_is_refused(saved_file, place, bit):
    path, checkpoint, _ = saved_file
    data = bytearray(path.read_bytes())
    data[PLACES[place](bytes(data))] ^= 1 << bit
    path.write_bytes(data)
    with pytest.raises(SessionError, match=r"chat.session is (damaged|not a session)"):
        load(path, checkpoint)


@pytest.mark.parametrize("keep", [0, 1, 8, 15, 16, 40, 0.3, 0.5, 0.9, -33, -32, -1])
def test_a_short_file_is_refused(saved_file, keep):
    path, checkpoint, _ = saved_file
    data = path.read_bytes()
    path.write_bytes(data[: int(keep * len(data)) if isinstance(keep, float) else keep])
    with pytest.raises(SessionError, match=r"chat.session is (damaged|not a session)"):
        load(path, checkpoint)


def test_bytes_after_the_end_are_refused(saved_file):
    path, checkpoint, _ = saved_file
    with path.open("ab") as file:
        file.write(b"x")
    with pytest.raises(SessionError, match="damaged"):
        load(path, checkpoint)


@pytest.mark.parametrize("content", [b"GGUF" + bytes(60), b"\x89PNG\r\n\x1a\n" + bytes(50), b"{}"])
def test_a_file_of_another_kind_is_named_as_such(nano_checkpoints, tmp_path, content):
    path = tmp_path / "x"
    path.write_bytes(content)
    with pytest.raises(SessionError, match="not a session of Twoends"):
        read_session(path, checkpoint=nano_checkpoints["kimi-k3"])


def test_a_file_that_is_not_there_is_named(nano_checkpoints, tmp_path):
    with pytest.raises(SessionError, match=r"gone.session can't be read: No such file"):
        read_session(tmp_path / "gone.session", checkpoint=nano_checkpoints["kimi-k3"])


class FullDisk:
    """A file that takes so many bytes and then says that the disk is full."""

    def __init__(self, file, room, number):
        self._file, self._room, self._number = file, room, number

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._file.close()

    def __getattr__(self, name):
        return getattr(self._file, name)

    def write(self, data):
        self._room -= len(data)
        if self._room < 0:
            raise OSError(self._number, os.strerror(self._number))
        return self._file.write(data)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("room", [0, 2000, 20_000])
def test_a_disk_that_fills_leaves_nothing_half_written(saved_file, monkeypatch, room, number):
    path, checkpoint, state = saved_file
    before = path.read_bytes()
    real = Path.open
    monkeypatch.setattr(
        Path, "open", lambda self, mode="r", **k: FullDisk(real(self, mode, **k), room, number)
    )
    with pytest.raises(DoesNotFit, match="the session needs") as caught:
        save_session(path, checkpoint=checkpoint, ids=list(range(10)), state=state)
    monkeypatch.undo()
    assert caught.value.exit_code == 3
    assert list(path.parent.iterdir()) == [path]
    assert path.read_bytes() == before


def test_too_little_room_is_said_before_anything_is_written(saved_file, monkeypatch):
    path, checkpoint, state = saved_file
    usage = session_module.shutil.disk_usage(path.parent)._replace(free=1000)
    monkeypatch.setattr(session_module.shutil, "disk_usage", lambda where: usage)
    monkeypatch.setattr(session_module, "_write", lambda *a: pytest.fail("nothing may be written"))
    with pytest.raises(DoesNotFit, match=r"are free"):
        save_session(path, checkpoint=checkpoint, ids=list(range(10)), state=state)


@pytest.fixture
def tiny_disk(tmp_path):
    """A file system of 64 KB, where root may mount one."""
    place = tmp_path / "disk"
    place.mkdir()
    try:
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)], capture_output=True, text=True
        )
    except FileNotFoundError:
        pytest.skip("this system has no mount command")
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_really_full_disk_leaves_nothing_half_written(tiny_disk, nano_checkpoints, monkeypatch):
    checkpoint = nano_checkpoints["kimi-k3"]
    state = filled_state(checkpoint)
    # Between the look and the write someone else may fill the disk: the look sees plenty.
    usage = session_module.shutil.disk_usage(tiny_disk)._replace(free=10**12)
    with monkeypatch.context() as patched:
        patched.setattr(session_module.shutil, "disk_usage", lambda where: usage)
        with pytest.raises(DoesNotFit, match="the session needs"):
            save_session(tiny_disk / "s", checkpoint=checkpoint, ids=list(range(10)), state=state)
    assert list(tiny_disk.iterdir()) == []
    with pytest.raises(DoesNotFit, match="are free"):
        save_session(tiny_disk / "s", checkpoint=checkpoint, ids=list(range(10)), state=state)
    assert list(tiny_disk.iterdir()) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError()])
def test_a_signal_while_saving_leaves_nothing_half_written(saved_file, monkeypatch, error):
    path, checkpoint, state = saved_file
    before = path.read_bytes()

    def interrupted(fd):
        raise error

    monkeypatch.setattr(session_module.os, "fsync", interrupted)
    with pytest.raises(type(error)):
        save_session(path, checkpoint=checkpoint, ids=list(range(10)), state=state)
    assert list(path.parent.iterdir()) == [path]
    assert path.read_bytes() == before


@pytest.mark.parametrize("where", ["gone/s", "file/s", "folder"])
def test_a_place_that_cannot_be_written_is_named(nano_checkpoints, tmp_path, where):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    checkpoint = nano_checkpoints["kimi-k3"]
    before = sorted(tmp_path.iterdir())
    with pytest.raises(SessionError, match="can't be saved to") as caught:
        save_session(tmp_path / where, checkpoint=checkpoint, ids=[1, 2], state=filled_state(checkpoint, 1))
    assert str(tmp_path / where) in caught.value.headline
    assert sorted(tmp_path.iterdir()) == before


def test_the_header_is_what_the_format_says(saved_file):
    path, checkpoint, state = saved_file
    data = path.read_bytes()
    assert data[:8] == b"TWOENDS1"
    header_bytes = int.from_bytes(data[8:16], "little")
    header = json.loads(data[16 : 16 + header_bytes])
    assert header["version"] == 1
    assert header["fingerprint"] == checkpoint.index.fingerprint
    assert (header["ids"], header["position"]) == ([*range(9), 44], 9)
    body = b"".join(array.tobytes() for _, array in state.arrays())
    assert data[16 + header_bytes + 32 : -32] == body


@pytest.mark.parametrize("family", FAMILIES)
def test_a_conversation_goes_on_after_a_session_with_new_text(nano_checkpoints, tmp_path, family):
    checkpoint = nano_checkpoints[family]
    more = [3, 99, 500]
    with opened(checkpoint) as model:
        generator = Generator(model, list(PROMPT), chunk=4)
        generate(generator, 5)
        save_session(tmp_path / "s", checkpoint=checkpoint, ids=generator.ids, state=model.state)
        generator.ids += more
        expected = generate(generator, 5)
    with opened(checkpoint, budget="floor") as model:
        saved = read_session(tmp_path / "s", checkpoint=checkpoint)
        restore_state(saved, model.state)
        found = generate(Generator(model, [*saved.ids, *more], chunk=2), 5)
    assert found.position_digests == expected.position_digests
