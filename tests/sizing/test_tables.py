"""Tables of facts: each entry with a source and a date, users add their own, what is wrong is named."""

from __future__ import annotations

import tomllib

import pytest

from twoends.errors import OptionError
from twoends.sizing.machines import load_machines
from twoends.sizing.prices import load_prices
from twoends.sizing.tables import asset

MACHINE = """
[[machine]]
name = "mine"
ram_gb = 96
memory_gbs = 90
cores = 12
disk_gbs = 5
source = "its box"
date = "2026-11-30"
"""


@pytest.mark.parametrize("name", ["machines.toml", "prices.toml", "routing.toml", "example.toml"])
def test_every_entry_that_comes_along_has_a_source_and_a_date(name):
    for tables in tomllib.loads(asset(name).read_text()).values():
        for entry in tables if isinstance(tables, list) else [tables]:
            assert entry["source"]
            assert entry["date"]


def test_the_table_has_disks_laptops_servers_and_accelerators(machines):
    assert {"H100", "H200", "B200", "B300", "GB300"} == set(machines.accelerators)
    assert {"Samsung 990 PRO", "laptop-32", "server-epyc-256", "gb300-nvl72"} <= {
        *machines.disks,
        *machines.machines,
    }


def test_a_machine_of_your_own_is_added(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(MACHINE)
    found = load_machines(path).machine("mine")
    assert (found.ram_bytes.value, found.disk_rate.value, found.cores) == (96e9, 5e9, 12)
    assert found.disk_rate.source == "its box (2026-11-30)"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("ram_gb = 96", "ram_gb = 0", r"'ram_gb' is 0; it must be above zero"),
        ("ram_gb = 96", "ram_gb = -1", r"'ram_gb' is -1; it must be above zero"),
        ("ram_gb = 96", "", r"'ram_gb' is missing"),
        ("ram_gb = 96", 'ram_gb = "96"', r"'ram_gb' must be a number"),
        ("ram_gb = 96", "ram_gb = nan", r"'ram_gb' must be a number"),
        ("cores = 12", "cores = 1.5", r"'cores' must be a whole number"),
        ("cores = 12", "cores = 12\ncorse = 3", r"'corse' is no field of it; nearest known name: cores"),
        ("disk_gbs = 5", 'disk = "a tape"', r"which is in no \[\[disk\]\]"),
        ('date = "2026-11-30"', "", r"'date' is missing"),
        ('source = "its box"', "", r"'source' is missing"),
        ("[[machine]]", "[[machines]]", r"has no use for 'machines'[\s\S]*machine"),
        ("[[machine]]", "[[machine", r"not valid TOML"),
    ],
)
def test_a_wrong_entry_is_refused_with_the_field(tmp_path, old, new, words):
    path = tmp_path / "mine.toml"
    path.write_text(MACHINE.replace(old, new))
    with pytest.raises(OptionError, match=words):
        load_machines(path)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(OptionError, match=r"can't be read"):
        load_machines(tmp_path / "none.toml")


def test_an_unknown_machine_is_told_the_nearest(machines):
    with pytest.raises(OptionError, match=r"no machine 'b300'[\s\S]*b300-8"):
        machines.machine("b300")


@pytest.mark.parametrize("word", ["0xB300", "-1xB300", "B300", "8B300", "8x", "9999999xB300"])
def test_what_is_no_group_of_accelerators_is_refused(machines, word):
    with pytest.raises(OptionError, match="--gpus"):
        machines.group(word)


def test_an_unknown_accelerator_is_told_the_nearest(machines):
    with pytest.raises(OptionError, match=r"no accelerator 'B301'[\s\S]*B300"):
        machines.group("8xB301")


def test_prices_of_your_own_are_added(tmp_path):
    path = tmp_path / "prices.toml"
    path.write_text(
        '[[currency]]\ncode = "EUR"\nper_usd = 0.86\nsource = "a bank"\ndate = "2026-11-27"\n'
        '[[rent]]\nwhat = "8xB300"\nprice = 50\ncurrency = "EUR"\nsource = "an offer"\ndate = "2026-11-28"\n'
    )
    prices = load_prices(path)
    assert prices.rents["8xB300"].source == "an offer (2026-11-28)"
    assert prices.convert(prices.rents["8xB300"], "USD").amount == pytest.approx(50 / 0.86)


def test_a_currency_in_small_letters_is_refused(tmp_path):
    path = tmp_path / "prices.toml"
    path.write_text('[[currency]]\ncode = "eur"\nper_usd = 0.86\nsource = "a bank"\ndate = "2026"\n')
    with pytest.raises(OptionError, match="three capital letters"):
        load_prices(path)
