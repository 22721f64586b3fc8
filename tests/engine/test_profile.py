"""The profile file: it comes back as it was, and nothing damaged or foreign is used."""

from __future__ import annotations

import numpy as np
import pytest

from twoends.engine.policies import Decayed
from twoends.engine.profile import ExpertProfile, read_profile, write_profile
from twoends.errors import OptionError, TwoendsError

TABLE = np.arange(12, dtype=np.float32).reshape(3, 4) / 7


@pytest.fixture
def path(tmp_path):
    place = tmp_path / "p.profile"
    write_profile(place, ExpertProfile(fingerprint="f1", popularity_LE=TABLE))
    return place


def read(path, *, fingerprint="f1", num_layers=3, num_experts=4):
    return read_profile(path, fingerprint=fingerprint, num_layers=num_layers, num_experts=num_experts)


def test_a_profile_comes_back_bit_for_bit_and_leaves_nothing_else(path):
    found = read(path)
    assert found.fingerprint == "f1"
    assert found.popularity_LE.dtype == np.float32
    assert np.array_equal(found.popularity_LE, TABLE)
    assert list(path.parent.iterdir()) == [path]


def test_every_flipped_bit_is_found(path):
    good = path.read_bytes()
    for at in range(len(good)):
        bad = bytearray(good)
        bad[at] ^= 0x10
        path.write_bytes(bad)
        with pytest.raises(OptionError, match=r"^--profile: p\.profile"):
            read(path)


@pytest.mark.parametrize("length", [0, 7, 15, 40, -33, -1])
def test_a_short_file_is_refused(path, length):
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(OptionError, match=r"^--profile: p\.profile"):
        read(path)


def test_bytes_behind_the_end_are_refused(path):
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(OptionError, match="its length is not that of this model's table"):
        read(path)


def test_another_models_profile_is_refused_with_both_fingerprints(path):
    with pytest.raises(OptionError, match=r"p\.profile was not made by this model") as error:
        read(path, fingerprint="f2")
    assert error.value.evidence == (("this model", "f2"), ("profile", "f1"))


def test_a_table_of_another_shape_is_refused(path):
    with pytest.raises(OptionError, match="its length is not that of this model's table"):
        read(path, num_layers=4, num_experts=3)


@pytest.mark.parametrize("value", [np.nan, np.inf, -1.0])
def test_a_count_that_is_none_is_refused_even_with_a_right_checksum(tmp_path, value):
    table = TABLE.copy()
    table[1, 1] = value
    write_profile(tmp_path / "p", ExpertProfile(fingerprint="f1", popularity_LE=table))
    with pytest.raises(OptionError, match="not a number from zero up"):
        read(tmp_path / "p")


def test_a_place_that_can_not_be_written_is_named(tmp_path):
    with pytest.raises(TwoendsError, match="the profile can't be saved to"):
        write_profile(tmp_path / "no" / "p", ExpertProfile(fingerprint="f1", popularity_LE=TABLE))


def test_a_warm_policy_keeps_what_was_popular():
    """Two newcomers of equal rank and recency: the one that the profile knows takes the slot."""
    policy = Decayed(3, first_layer=0, num_layers=1, num_experts=4, ranked=False)
    policy.warm(np.array([[0, 0, 9, 0]], np.float32))
    policy.observe(0, np.array([[1, 2, 3]], np.int32))
    kept = policy.place((0, 1), lambda slot: False)
    assert policy.place((0, 2), lambda slot: False) == kept
    assert policy.place((0, 3), lambda slot: False) != kept
    assert policy.popularity_LE.argmax() == 2
