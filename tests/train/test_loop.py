"""The loop: bits that survive a kill, tokens that weigh the same wherever they stand, what a run refuses."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the training half needs torch (pip install 'twoends[train]')")

from tests.train.models import noise, tiny_architecture, tiny_recipe  # noqa: E402
from twoends.errors import OptionError  # noqa: E402
from twoends.train import muon  # noqa: E402
from twoends.train.loop import LOSSES, Run, train  # noqa: E402
from twoends.train.rows import IGNORE, batch, inputs_and_targets  # noqa: E402
from twoends.train.snapshot import SNAPSHOTS, newest_snapshot  # noqa: E402

ROOT = Path(__file__).parents[2]
# A run of its own process that saves after every step and dies, without a word, after or within step argv[2].
KILLED = """
import os, signal, sys
from pathlib import Path
import torch.distributed.checkpoint as dcp
from tests.train.models import noise, tiny_recipe
from twoends.train.loop import Run
run, at, when = Run(tiny_recipe(), noise(), Path(sys.argv[1])), int(sys.argv[2]), sys.argv[3]
save = dcp.save
def die(*args, **kwargs):
    if run.done_steps == at and when == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    save(*args, **kwargs)
    if run.done_steps == at and when == "during":
        os.kill(os.getpid(), signal.SIGKILL)
dcp.save = die
while run.done_steps < 6:
    run.step()
    run.save()
    if run.done_steps == at:
        os.kill(os.getpid(), signal.SIGKILL)
"""


def _bits(run: Run) -> dict[str, torch.Tensor]:
    state = {f"model.{name}": tensor for name, tensor in run.model.state_dict().items()}
    for index, moments in run.optimiser.state_dict()["state"].items():
        state |= {f"optimiser.{index}.{name}": torch.as_tensor(value) for name, value in moments.items()}
    return state


def _assert_same_bits(run: Run, other: Run) -> None:
    wanted, found = _bits(run), _bits(other)
    assert wanted.keys() == found.keys()
    assert [name for name in wanted if not torch.equal(wanted[name], found[name])] == []


@pytest.mark.parametrize(
    "changes",
    [
        {"optimiser": "per-head-muon"},
        {"optimiser": "muon", "balance": "sign"},
        {"optimiser": "adamw", "balance": "auxiliary", "matmul_dtype": "bfloat16"},
        {"micro_rows": 1, "expert_activations": "mxfp8", "recompute": True},
        {"mtp": True, "expert_weights": "none", "balance": "none", "pack_documents": False},
    ],
    ids=lambda changes: "-".join(str(value) for value in changes.values()),
)
def test_a_run_stopped_and_resumed_has_the_bits_of_a_straight_one(
    tmp_path: Path, changes: dict[str, object]
) -> None:
    recipe = tiny_recipe(**changes)
    straight = Run(recipe, noise(), tmp_path / "straight")
    train(straight)
    stopped = Run(recipe, noise(), tmp_path / "stopped")
    assert not train(stopped, should_stop=lambda: stopped.done_steps == 3)
    resumed = Run(recipe, noise(), tmp_path / "stopped")
    resumed.restore()
    assert train(resumed)
    _assert_same_bits(straight, resumed)
    assert (tmp_path / "stopped" / LOSSES).read_text() == (tmp_path / "straight" / LOSSES).read_text()


@pytest.mark.parametrize(
    ("step", "when", "kept"), [(1, "after", 1), (4, "after", 4), (3, "before", 2), (3, "during", 2)]
)
def test_kill_9_at_any_step_and_resume_gives_the_same_weights(
    tmp_path: Path, step: int, when: str, kept: int
) -> None:
    straight = Run(tiny_recipe(), noise(), tmp_path / "straight")
    train(straight)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path / "killed"), str(step), when],
        env=environment, cwd=ROOT, timeout=60, check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    resumed = Run(tiny_recipe(), noise(), tmp_path / "killed")
    resumed.restore()
    assert resumed.done_steps == kept
    assert train(resumed)
    _assert_same_bits(straight, resumed)


def test_the_update_is_multiplied_in_the_recipes_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = set()

    def recording(stack: torch.Tensor, *, matmul_dtype: torch.dtype | None = None) -> torch.Tensor:
        seen.add(matmul_dtype)
        return stack

    monkeypatch.setattr(muon, "orthogonalise", recording)
    Run(tiny_recipe(matmul_dtype="bfloat16"), noise(), tmp_path).step()
    assert seen == {torch.bfloat16}


def test_loss_falls_on_rows_seen_again_and_again(tmp_path: Path) -> None:
    run = Run(tiny_recipe(steps=15, learning_rate=3e-2), noise(rows=4), tmp_path)
    train(run)
    losses = [record["loss_nats"] for record in run.losses]
    assert losses[-1] < losses[0] - 1


def test_only_the_newest_snapshot_stays(tmp_path: Path) -> None:
    run = Run(tiny_recipe(), noise(), tmp_path)
    for _ in range(3):
        run.step()
        run.save()
    assert [path.name for path in (tmp_path / SNAPSHOTS).iterdir()] == ["step-00000003"]


def test_a_folder_without_its_marker_is_no_snapshot(tmp_path: Path) -> None:
    run = Run(tiny_recipe(), noise(), tmp_path)
    run.save()
    newest = newest_snapshot(tmp_path)
    assert newest is not None
    (newest / "whole.json").unlink()
    with pytest.raises(OptionError, match="no snapshot"):
        Run(tiny_recipe(), noise(), tmp_path).restore()


def test_a_snapshot_of_another_model_or_optimiser_is_refused(tmp_path: Path) -> None:
    Run(tiny_recipe(), noise(), tmp_path).save()
    other = dataclasses.replace(tiny_recipe(), model=tiny_architecture(num_experts=8))
    with pytest.raises(OptionError, match=r"another \[model\]"):
        Run(other, noise(), tmp_path).restore()
    with pytest.raises(OptionError, match="optimiser = 'per-head-muon'"):
        Run(tiny_recipe(optimiser="adamw"), noise(), tmp_path).restore()


def test_a_token_weighs_the_same_in_a_part_of_a_step_and_in_the_whole(tmp_path: Path) -> None:
    """Rows with 1 to 24 targets: a mean of means would be off by a large factor."""
    text = noise(rows=4)
    for row in range(4):
        text.rows[row, 24 // (row + 1) :] = 345
    gradients = []
    for micro_rows in (4, 3, 1):
        run = Run(tiny_recipe(batch_rows=4, micro_rows=micro_rows), text, tmp_path)
        run._gradients(text.rows.astype(np.int64))
        gradients.append([p.grad.double() for p in run.model.parameters() if p.grad is not None])
    for parts in gradients[1:]:
        for whole, part in zip(gradients[0], parts, strict=True):
            # Sums of binary32 in another order; 1e-4 of the largest is a hundred times the rounding.
            assert (whole - part).abs().max() <= 1e-4 * whole.abs().max() + 1e-9


def test_what_follows_an_end_of_text_is_no_target() -> None:
    inputs, targets = inputs_and_targets(np.array([[5, 9, 6, 7, 9, 8]]), eos=9)
    assert inputs.tolist() == [[5, 9, 6, 7, 9]]
    assert targets.tolist() == [[9, IGNORE, 7, 9, IGNORE]]


def test_the_router_bias_moves_in_training_and_not_in_evaluation(tmp_path: Path) -> None:
    run = Run(tiny_recipe(), noise(), tmp_path)
    run.step()
    before = [router.e_score_correction_bias.clone() for router in run.model.routers()]
    assert all(bias.any() for bias in before)
    run.evaluate()
    after = [router.e_score_correction_bias for router in run.model.routers()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_the_loss_curve_has_one_line_a_step(tmp_path: Path) -> None:
    train(Run(tiny_recipe(steps=3), noise(), tmp_path))
    lines = [json.loads(line) for line in (tmp_path / LOSSES).read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]


def test_heldout_bits_per_byte_of_a_model_that_knows_nothing_are_the_uniform_guess(tmp_path: Path) -> None:
    text = noise()
    text.bytes_of_id[:] = 1
    run = Run(tiny_recipe(), text, tmp_path)
    with torch.no_grad():
        run.model.lm_head.weight.zero_()
    assert run.evaluate()["noise"] == pytest.approx(np.log2(600), rel=1e-6)


@pytest.mark.parametrize(
    ("key", "word"),
    [("matmul_dtype", "float8"), ("optimiser", "sgd"), ("balance", "luck"), ("expert_weights", "int4")],
)
def test_an_unknown_word_is_refused_with_the_known_ones(tmp_path: Path, key: str, word: str) -> None:
    with pytest.raises(OptionError, match=f"{key} is '{word}'; known are"):
        Run(tiny_recipe(**{key: word}), noise(), tmp_path)


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
        Run(tiny_recipe(compile=True), noise(), tmp_path)
