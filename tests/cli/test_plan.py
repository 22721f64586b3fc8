"""`twoends plan`: the screen, the figures, and plans from a config alone."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from twoends.cli.plan_model import PlanReport, draw
from twoends.cli.screen import Screen
from twoends.engine import open as engine_open
from twoends.engine.budget import Plan, Row
from twoends.engine.device import DiskRate

ROOT = Path(__file__).parents[2]
SHARED_K3 = ROOT.parent / "shared" / "data" / "kimi-k3"

SCREEN = """\
Kimi K3   93 layers (69 KDA, 24 MLA)   1.56 TB on disk            budget 8.00 GB

  stays      program            117.0 MB  #         measured; 12 MB to spare
             recurrent state    464.6 MB  #         69 KDA layers, one sequence
             latent cache       226.5 MB  #         4,096 tokens of 55,296 B
             pinned trunk        6.70 GB  #######   stays
  streams    trunk window       100.7 MB  #         panels of 8.4 MB
             20 expert slots    350.9 MB  #         of 82,432 experts
  left over                      40.3 MB  #

  one token  104.46 GB trunk + 25.83 GB experts = 130.29 GB
             at most: experts that are already here are not read again
  estimate   27.1 s of reading at 4.80 GB/s (twoends doctor, 2026-11-30)

  floor       912.0 MB   the least budget that runs
  less         6.00 GB   27.1 s a token
  more        12.00 GB   27.1 s a token
             the answer is the same at any budget
"""


def a_plan(ram_bytes: int) -> Plan:
    """A plan by hand, so that the screen's letters don't depend on the planner."""

    def row(name: str, num_bytes: int, remark: str) -> Row:
        return Row(name=name, num_bytes=num_bytes, remark=remark)

    shown = {
        "ram_bytes": ram_bytes,
        "pinned_bytes": 6_700_000_000,
        "slot_bytes": 17_551_360,
        "rows": (
            row("program", 117_000_000, "measured; 12 MB to spare"),
            row("recurrent state", 464_600_000, "69 KDA layers, one sequence"),
            row("latent cache", 226_500_000, "4,096 tokens of 55,296 B"),
            row("pinned trunk", 6_700_000_000, "stays"),
            row("trunk window", 100_700_000, "panels of 8.4 MB"),
            row("20 expert slots", 350_900_000, "of 82,432 experts"),
        ),
        "floor_rows": (row("program", 912_000_000, ""),),
        "trunk_bytes_per_pass": 111_160_000_000,
        "expert_bytes_per_request": 17_547_264.0,
        "num_sequences": 1,
        "experts_per_pass": 1472,
        "experts_in_all": 82_432,
        "embedding_bytes_per_token": 20_480,
    }
    return Plan(**{field.name: shown.get(field.name, 0) for field in dataclasses.fields(Plan)})


@pytest.fixture
def fixed_program(monkeypatch):
    """The program's own memory, which is measured, is always the same here."""
    monkeypatch.setattr(engine_open, "counted_bytes", lambda: 45_000_000)


def test_the_screen_to_the_letter(capsys):
    layers = {"kda_layers": range(69), "mla_layers": range(24), "num_layers": 93, "family": "kimi-k3"}
    checkpoint = SimpleNamespace(
        config=SimpleNamespace(**layers), index=SimpleNamespace(total_bytes=1_560_860_324_864)
    )
    report = PlanReport(
        checkpoint=checkpoint,
        plan=a_plan(8 * 10**9),
        below=a_plan(6 * 10**9),
        above=a_plan(12 * 10**9),
        rate=DiskRate(bytes_per_s=4.8e9, date="2026-11-30", is_direct=True, piece_bytes=4 * 2**20, depth=4),
        is_predicted=False,
        has_tokenizer=True,
    )
    draw(report, Screen.of_process())
    assert capsys.readouterr().out == SCREEN


def test_json_has_the_floor_and_every_row(twoends, nano, fixed_program):
    result = twoends("plan", nano, "--ram", "124MB", "--kernels", "reference", "--json")
    found = json.loads(result.out)
    assert found["floor_bytes"] == sum(row["num_bytes"] for row in found["floor_rows"])
    assert found["total_bytes"] == sum(row["num_bytes"] for row in found["rows"]) <= 124_000_000
    assert found["total_bytes"] + found["left_over_bytes"] == found["ram_bytes"] == 124_000_000


def test_the_floor_itself_runs_and_a_byte_less_does_not(twoends, nano, fixed_program):
    words = ["plan", nano, "--kernels", "reference", "--context", "100", "--chunk", "1", "--json"]
    floor = json.loads(twoends(*words, "--ram", "1GB").out)["floor_bytes"]
    assert twoends(*words, "--ram", floor).code == 0
    assert twoends(*words, "--ram", floor - 1).code == 3


def test_a_config_alone_gives_the_plan_of_the_whole_checkpoint(twoends, nano, tmp_path, fixed_program):
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(nano / "config.json", alone)
    shutil.copy(nano / "tiktoken.model", alone)
    shutil.copy(nano / "tokenizer_config.json", alone)
    words = ["--ram", "124MB", "--kernels", "reference", "--json"]
    predicted = json.loads(twoends("plan", alone, *words).out)
    real = json.loads(twoends("plan", nano, *words).out)
    assert predicted.pop("predicted") is True
    assert real.pop("predicted") is False
    for found in (predicted, real):
        del found["model"], found["fingerprint"]
    assert predicted == real


@pytest.mark.skipif(not SHARED_K3.is_dir(), reason="the released config is not beside the repository")
def test_the_release_has_a_floor_under_one_gigabyte():
    # a process of its own: the floor holds what the process already holds, and this one holds the tests
    words = ["plan", SHARED_K3, "--ram", "8GB", "--context", "4096", "--json"]
    words = [sys.executable, "-m", "twoends", *words]
    found = json.loads(subprocess.run(words, check=True, capture_output=True, cwd=ROOT).stdout)
    assert found["num_layers"] == 93
    # the released tokenizer is not beside the config; its share must fit as well
    assert found["floor_bytes"] + found["missing_tokenizer_bytes"] < 10**9


@pytest.mark.skipif(not SHARED_K3.is_dir(), reason="the released config is not beside the repository")
def test_no_line_of_the_release_is_wider_than_the_screen(twoends):
    lines = twoends("plan", SHARED_K3, "--ram", "8GB").out.splitlines()
    assert max(map(len, lines)) <= 80
