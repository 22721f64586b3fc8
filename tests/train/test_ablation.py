"""The ablation table: its cells, what it claims, and the command that fills it."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from twoends.errors import OptionError
from twoends.train.ablation import CELLS, SEEDS, TABLES, Cell, all_cells, cell_recipe, tables, verdict
from twoends.train.recipe import parse_recipe, preset, recipe_text

ROOT = Path(__file__).parents[2]


def test_every_cell_differs_from_the_base_in_the_key_it_names_and_its_seed() -> None:
    base = preset("ablation")
    for cell in all_cells():
        recipe = cell_recipe(base, cell)
        changed = {
            field.name
            for field in dataclasses.fields(recipe.train)
            if getattr(recipe.train, field.name) != getattr(base.train, field.name)
        }
        assert changed - {"seed"} == set(CELLS[cell.name])
        assert recipe.train.seed == cell.seed
    assert len(all_cells()) == 6 * len(SEEDS)


@pytest.mark.parametrize("name", ["nano", "ablation", "ten"])
def test_a_recipe_written_out_is_read_back_the_same(name: str) -> None:
    recipe = preset(name)
    assert parse_recipe(recipe_text(recipe), path=Path("x")) == recipe


def test_an_unknown_cell_is_refused() -> None:
    with pytest.raises(OptionError, match="no cell 'sgd'"):
        all_cells(["sgd"])


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        ([1.0, 1.1, 1.2], [1.3, 1.4, 1.5], "a is below b in every run, by 0.3000"),
        ([1.3, 1.4, 1.5], [1.0, 1.1, 1.2], "b is below a in every run, by 0.3000"),
        ([1.0, 1.1, 1.35], [1.3, 1.4, 1.5], "overlap: no difference"),
        ([1.0], [1.3, 1.4, 1.5], "too few runs"),
    ],
)
def test_no_order_is_claimed_that_a_single_run_contradicts(
    one: list[float], other: list[float], said: str
) -> None:
    assert said in verdict([("a", one), ("b", other)])


def _result(folder: Path, cell: Cell, bits: float) -> None:
    (folder / cell.folder).mkdir(parents=True)
    found = {
        "complete": True, "heldout_bits_per_byte": {"x": bits, "y": bits + 1},
        "heldout_bits_per_byte_as_stored": {"x": bits + 0.1, "y": bits + 1.1}, "max_violation": bits,
    }  # fmt: skip
    (folder / cell.folder / "result.json").write_text(json.dumps(found))


def test_the_table_has_mean_and_spread_of_the_runs_that_are_finished(tmp_path: Path) -> None:
    for seed, bits in zip(SEEDS, (1.0, 1.1, 1.2), strict=True):
        _result(tmp_path, Cell(name="base", seed=seed), bits)
    _result(tmp_path, Cell(name="adamw", seed=1), 2.0)
    text = tables(tmp_path)
    assert "| Per-Head Muon | 3 | 1.6000 | 0.1000 |" in text
    assert "| MXFP4 after training | 3 | 1.7000 | 0.1000 |" in text
    assert "| Quantile Balancing | 3 | 1.6000 | 0.1000 | 1.1000 +- 0.1000 |" in text
    assert "| AdamW | 1 | 2.5000 | - |" in text
    assert all(f"### {title}" in text for title in TABLES)


@pytest.mark.timeout(300)
def test_the_command_trains_a_cell_and_leaves_a_finished_one_alone(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="the training half needs torch (pip install 'twoends[train]')")
    pytest.importorskip("tokenizers", reason="the vocabulary trainer is in the train extra")
    from tests.train.test_command import RECIPE

    recipe = tmp_path / "tiny.toml"
    recipe.write_text((RECIPE % 2).replace('"Once upon a time"', ""))
    words = [sys.executable, "-m", "twoends", "train", "--ablation", str(recipe)]
    words += ["--out", str(tmp_path / "t"), "--cells", "adamw,qat", "--jobs", "2", "--json"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=250, check=False)
    found = json.loads(done.stdout)
    assert (done.returncode, len(found["left"])) == (0, 0), done.stderr
    assert {name for name, cell in found["cells"].items() if cell["complete"]} == {
        f"{name}-{seed}" for name in ("adamw", "qat") for seed in SEEDS
    }
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "t").glob("*/result.json")}
    again = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert json.loads(again.stdout) == found
    assert {path: path.stat().st_mtime_ns for path in before} == before
