"""`twoends plan`: the screen, the figures, and plans from a config alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from twoends.cli.disks import DiskRate
from twoends.engine import open as engine_open

SHARED_K3 = Path(__file__).parents[3] / "shared" / "data" / "kimi-k3"

SCREEN = """\
Kimi K3   9 layers (6 KDA, 3 MLA)   3.8 MB on disk               budget 124.0 MB

  stays      program            121.0 MB  ########  measured; 76 MB to spare
             recurrent state     98.3 KB            6 KDA layers, one sequence
             latent cache         2.2 MB  #         4,096 tokens of 528 B
             embedding rows     131.1 KB            read one by one
             activations         49.2 KB            2 tokens at a time
             pinned trunk        53.2 KB            stays
  streams    trunk window       348.2 KB            panels of 65.5 KB
             8 expert slots     147.5 KB            of 112 experts
  left over                       5.9 KB

  one token  3.4 MB trunk + 440.0 KB experts = 3.8 MB
             at most: experts that are already here are not read again
  estimate   1.91 s of reading at 2.0 MB/s (twoends doctor, 2026-11-30)

  floor       123.8 MB   the least budget that runs
  more        128.0 MB   224 ms a token
             the answer is the same at any budget
"""


@pytest.fixture
def fixed_program(monkeypatch):
    """The program's own memory, which is measured, is always the same here."""
    monkeypatch.setattr(engine_open, "resident_bytes", lambda: 45_000_000)


def test_the_screen_to_the_letter(twoends, nano, fixed_program, monkeypatch):
    rate = DiskRate(bytes_per_s=2e6, date="2026-11-30", is_direct=True)
    monkeypatch.setattr("twoends.cli.plan_model.rate_under", lambda directory: rate)
    result = twoends("plan", nano, "--ram", "124MB", "--kernels", "reference")
    assert (result.code, result.err) == (0, "")
    assert result.out == SCREEN


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
def test_the_release_has_a_floor_under_one_gigabyte(twoends):
    found = json.loads(twoends("plan", SHARED_K3, "--ram", "8GB", "--context", "4096", "--json").out)
    assert found["num_layers"] == 93
    # the released tokenizer is not beside the config; its share must fit as well
    assert found["floor_bytes"] + found["missing_tokenizer_bytes"] < 10**9


@pytest.mark.skipif(not SHARED_K3.is_dir(), reason="the released config is not beside the repository")
def test_no_line_of_the_release_is_wider_than_the_screen(twoends):
    lines = twoends("plan", SHARED_K3, "--ram", "8GB").out.splitlines()
    assert max(map(len, lines)) <= 80
