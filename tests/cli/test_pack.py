"""`twoends pack`, and the commands that take a pack where a checkpoint is."""

from __future__ import annotations

import json

import pytest

from tests.support.backends import native_isas

pytestmark = pytest.mark.skipif(not native_isas(), reason="the native kernels are not built")


@pytest.fixture
def packed(twoends, nano, tmp_path):
    """A pack of the small checkpoint."""
    result = twoends("pack", nano, tmp_path / "pack")
    assert (result.code, result.err) == (0, "")
    return tmp_path / "pack"


def run_json(twoends, *words):
    result = twoends("run", *words, "-n", 6, "--json")
    assert result.code == 0, result.err
    return json.loads(result.out)


def test_a_run_from_a_pack_gives_the_same_logits_from_fewer_bytes(twoends, nano, packed):
    plain = run_json(twoends, nano, "hello")
    found = run_json(twoends, packed, "hello")
    assert found["ids"] == plain["ids"]
    assert found["logits_digest"] == plain["logits_digest"]
    assert found["bytes_trunk"] < plain["bytes_trunk"]


def test_pack_says_what_it_wrote_and_what_to_do_next(twoends, nano, tmp_path):
    result = twoends("pack", nano, tmp_path / "pack")
    assert result.code == 0
    assert "  packed   2.5 MB to 2." in result.out
    assert f"  twoends inspect {tmp_path / 'pack'} --verify\n" in result.out


def test_pack_again_keeps_every_layer(twoends, nano, packed):
    found = json.loads(twoends("pack", nano, packed, "--json").out)
    assert found["kept_layers"] == 10
    assert found["directory"] == str(packed)


def test_plan_counts_packed_bytes_and_what_unpacking_holds(twoends, nano, packed):
    plain = json.loads(twoends("plan", nano, "--ram", "1GB", "--json").out)
    found = json.loads(twoends("plan", packed, "--ram", "1GB", "--json").out)
    assert found["trunk_bytes_per_pass"] < plain["trunk_bytes_per_pass"]
    assert [row["name"] for row in found["rows"] if row["name"] == "unpacking"] == ["unpacking"]
    assert "unpacking" not in [row["name"] for row in plain["rows"]]


def test_inspect_shows_a_pack_and_verifies_it(twoends, packed):
    result = twoends("inspect", packed, "--verify")
    assert result.code == 0
    assert "% of the trunk, 128 blocks, entropy code\n" in result.out
    assert "  verified      128 blocks equal the source, byte for byte\n" in result.out


def test_verifying_what_is_no_pack_is_asked_wrongly(twoends, nano):
    result = twoends("inspect", nano, "--verify")
    assert result.code == 2
    assert "is no pack; --verify compares a pack with its source." in result.err


def test_a_source_without_a_pack_is_asked_wrongly(twoends, nano, tmp_path):
    result = twoends("run", nano, "hello", "-n", 1, "--source", tmp_path)
    assert result.code == 2
    assert "is no pack, so it has no source." in result.err


def test_a_pack_of_a_pack_is_refused(twoends, nano, packed, tmp_path):
    result = twoends("pack", packed, tmp_path / "again")
    assert result.code == 2
    assert f"Pack its source:  {nano}" in result.err


@pytest.mark.parametrize("direct", [[], ["--no-direct"]], ids=["direct", "buffered"])
def test_a_flipped_bit_ends_the_run_with_the_name_of_the_block(twoends, packed, direct):
    path = packed / "trunk-00004.pack"
    data = bytearray(path.read_bytes())
    # in the second block or, after large small tensors, still in the first; never between blocks
    data[4096 + 700] ^= 1
    path.write_bytes(data)
    result = twoends("run", packed, "hello", "-n", 2, *direct)
    assert result.code == 2
    assert result.out == ""
    assert "twoends: trunk-00004.pack is damaged: layer 3, " in result.err
    assert "expected   CRC-32 " in result.err


def test_a_flipped_bit_of_an_expert_ends_the_run_with_its_name(twoends, nano, tmp_path):
    """Every expert of a layer is damaged: whichever are chosen, their checksums say so."""
    assert twoends("pack", nano, tmp_path / "pack", "--experts").code == 0
    path = tmp_path / "pack" / "trunk-00004.pack"
    data = bytearray(path.read_bytes())
    for at in range(0, len(data), 4096):
        # expert blocks are the last of their file, and the only ones that begin so
        if data[at : at + 4] == b"TwX2":
            data[at + 5000] ^= 1
    path.write_bytes(data)
    result = twoends("run", tmp_path / "pack", "hello", "-n", 2)
    assert result.code == 2
    assert result.out == ""
    assert "twoends: trunk-00004.pack is damaged: layer 3, expert " in result.err


@pytest.mark.parametrize("options", [["--code", "fixed"], ["--code", "entropy"], ["--experts"]])
def test_every_form_of_pack_gives_the_same_logits(twoends, nano, tmp_path, options):
    found = json.loads(twoends("pack", nano, tmp_path / "pack", *options, "--json").out)
    assert found["code"] == ("fixed" if "fixed" in options else "entropy")
    assert (found["experts_bytes"] > 0) == ("--experts" in options)
    plain, packed = run_json(twoends, nano, "hello"), run_json(twoends, tmp_path / "pack", "hello")
    assert packed["logits_digest"] == plain["logits_digest"]


def test_pack_says_how_much_it_copies_of_the_experts(twoends, nano, tmp_path):
    result = twoends("pack", nano, tmp_path / "pack", "--experts")
    assert result.code == 0
    assert "  copying  " in result.out
    assert "of experts beside the trunk\n" in result.out
    assert "  experts   " in result.out


def test_packed_experts_take_less_of_the_plan(twoends, nano, tmp_path):
    twoends("pack", nano, tmp_path / "pack", "--experts")
    plain = json.loads(twoends("plan", nano, "--ram", "1GB", "--json").out)
    found = json.loads(twoends("plan", tmp_path / "pack", "--ram", "1GB", "--json").out)
    assert found["expert_bytes_per_token"] <= plain["expert_bytes_per_token"]


def test_a_session_goes_on_from_a_pack(twoends, nano, packed, tmp_path):
    straight = run_json(twoends, nano, "hello")
    twoends("run", nano, "hello", "-n", 2, "--save", tmp_path / "s")
    rest = twoends("run", packed, "--load", tmp_path / "s", "-n", 4, "--json")
    assert json.loads(rest.out)["ids"] == straight["ids"][2:]


@pytest.mark.parametrize("word", ["/a", "/a,", "/a,/a"])
def test_a_list_of_stripes_must_be_different_directories(twoends, nano, tmp_path, word):
    result = twoends("pack", nano, tmp_path / "pack", "--stripe", word)
    assert result.code == 2
    assert "is no list of different directories" in result.err
