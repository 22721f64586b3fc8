"""The loop: bits that survive a kill, the rate of learning, and what a run refuses."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the training half needs torch (pip install 'twoends[train]')")

from tests.train.models import tiny_architecture  # noqa: E402
from twoends.errors import OptionError  # noqa: E402
from twoends.train.loop import LOSSES, Run, Text, learning_rate, train  # noqa: E402
from twoends.train.recipe import DataRecipe, Recipe, TokenizerRecipe, TrainRecipe  # noqa: E402
from twoends.train.rows import batch  # noqa: E402


def _recipe(**changes: object) -> Recipe:
    settings: dict[str, object] = {
        "seed": 7, "steps": 6, "batch_rows": 2, "row_tokens": 24, "learning_rate": 3e-3,
        "final_learning_rate": 1e-4, "warmup_steps": 2, "weight_decay": 0.1, "beta1": 0.9, "beta2": 0.95,
        "clip_norm": 1.0, "router_bias_keep": 0.5, "matmul_dtype": "bfloat16", "compile": False,
        "snapshot_minutes": 60.0,
    }  # fmt: skip
    return Recipe(
        model=tiny_architecture(),
        tokenizer=TokenizerRecipe(num_ranks=344, sample_characters=1),
        data=DataRecipe(stories=1, echoes=1, tasks=1, characters=1, shares={}),
        train=TrainRecipe(**(settings | changes)),  # type: ignore[arg-type]
    )


def _text() -> Text:
    rows = np.random.default_rng(0).integers(0, 344, (5, 25)).astype(np.uint16)
    return Text(rows=rows, heldout={"noise": rows[:3]}, bytes_of_id=np.ones(600, dtype=np.int64))


def _bits(run: Run) -> dict[str, torch.Tensor]:
    state = {f"model.{name}": tensor for name, tensor in run.model.state_dict().items()}
    for index, moments in run.optimizer.state_dict()["state"].items():
        state |= {f"optimizer.{index}.{name}": value for name, value in moments.items()}
    return state


@pytest.mark.parametrize("matmul_dtype", ["float32", "bfloat16"])
def test_a_run_killed_and_resumed_has_the_bits_of_a_straight_one(tmp_path: Path, matmul_dtype: str) -> None:
    recipe = _recipe(matmul_dtype=matmul_dtype)
    straight = Run(recipe, _text(), tmp_path / "straight")
    train(straight)
    killed = Run(recipe, _text(), tmp_path / "killed")
    assert not train(killed, should_stop=lambda: killed.done_steps == 3)
    resumed = Run(recipe, _text(), tmp_path / "killed")
    resumed.restore()
    assert train(resumed)
    wanted, found = _bits(straight), _bits(resumed)
    assert wanted.keys() == found.keys()
    assert [name for name in wanted if not torch.equal(wanted[name], found[name])] == []
    assert (tmp_path / "killed" / LOSSES).read_text() == (tmp_path / "straight" / LOSSES).read_text()


def test_loss_falls_on_rows_seen_again_and_again(tmp_path: Path) -> None:
    run = Run(_recipe(steps=15, matmul_dtype="float32", learning_rate=3e-2), _text(), tmp_path)
    train(run)
    losses = [record["loss_nats"] for record in run.losses]
    assert losses[-1] < losses[0] - 1


def test_a_killed_write_leaves_the_old_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(_recipe(), _text(), tmp_path)
    run.step()
    run.save()

    def cut_short(state: object, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(torch, "save", cut_short)
    run.step()
    with pytest.raises(OSError, match="no space"):
        run.save()
    again = Run(_recipe(), _text(), tmp_path)
    again.restore()
    assert again.done_steps == 1


def test_a_snapshot_of_another_model_is_refused(tmp_path: Path) -> None:
    run = Run(_recipe(), _text(), tmp_path)
    run.save()
    other = dataclasses.replace(_recipe(), model=tiny_architecture(num_experts=8))
    with pytest.raises(OptionError, match=r"another \[model\]"):
        Run(other, _text(), tmp_path).restore()


def test_the_router_bias_moves_in_training_and_not_in_evaluation(tmp_path: Path) -> None:
    run = Run(_recipe(), _text(), tmp_path)
    run.step()
    before = [router.e_score_correction_bias.clone() for router in run.model.routers()]
    assert all(bias.any() for bias in before)
    run.evaluate()
    after = [router.e_score_correction_bias for router in run.model.routers()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_the_loss_curve_has_one_line_a_step(tmp_path: Path) -> None:
    train(Run(_recipe(steps=3), _text(), tmp_path))
    lines = [json.loads(line) for line in (tmp_path / LOSSES).read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]


def test_heldout_bits_per_byte_of_an_untrained_model_are_near_the_uniform_guess(tmp_path: Path) -> None:
    run = Run(_recipe(), _text(), tmp_path)
    with torch.no_grad():
        run.model.lm_head.weight.zero_()
    assert run.evaluate()["noise"] == pytest.approx(np.log2(600), rel=1e-6)


@pytest.mark.parametrize(
    ("step", "rate"), [(0, 1e-3), (9, 1e-2), (10, 1e-2), (60, 5.5e-3), (110, 1e-3), (500, 1e-3)]
)
def test_the_rate_warms_up_and_follows_half_a_cosine(step: int, rate: float) -> None:
    recipe = _recipe(steps=110, warmup_steps=10, learning_rate=1e-2, final_learning_rate=1e-3).train
    assert learning_rate(recipe, step) == pytest.approx(rate)


def test_an_unknown_number_type_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="matmul_dtype is 'float8'"):
        Run(_recipe(matmul_dtype="float8"), _text(), tmp_path)


def test_one_epoch_uses_every_row_once_and_the_next_in_another_order() -> None:
    rows = np.arange(12, dtype=np.uint16)[:, None]
    epochs = [
        [batch(rows, step=e * 4 + s, batch_rows=3, seed=1).ravel().tolist() for s in range(4)] for e in (0, 1)
    ]
    assert all(sorted(itertools.chain(*epoch)) == list(range(12)) for epoch in epochs)
    assert epochs[0] != epochs[1]


def test_a_recipe_that_compiles_needs_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(OptionError, match=r"compile = true.*no-such-compiler"):
        Run(_recipe(compile=True), _text(), tmp_path)
