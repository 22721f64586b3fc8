"""What a run says of itself before it runs: operations per token, memory of a step."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the training half needs torch (pip install 'twoends[train]')")

from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from tests.train.models import noise, tiny_architecture, tiny_recipe  # noqa: E402
from twoends.train.flops import matmul_rate, token_flops  # noqa: E402
from twoends.train.loop import Run  # noqa: E402
from twoends.train.memory import step_memory  # noqa: E402
from twoends.train.model import KimiK3  # noqa: E402

ROOT = Path(__file__).parents[2]


def _expert_operations(x_RK: tuple[int, int], weight_EFK: tuple[int, int, int], *_: Any, **__: Any) -> int:
    return 2 * x_RK[0] * weight_EFK[1] * weight_EFK[2]


def test_operations_are_those_that_torch_counts() -> None:
    arch = tiny_architecture(num_experts=4, num_experts_per_token=2, hidden_size=64)
    model, tokens = KimiK3(arch).initialise(1).eval(), 256
    # torch doesn't look into an operator of ours: every row of its input meets one expert.
    of_experts = {torch.ops.twoends.expert_products: _expert_operations}
    with FlopCounterMode(display=False, custom_mapping=of_experts) as counter, torch.no_grad():
        model(torch.randint(0, 300, (2, tokens)))
    told = token_flops(arch, row_tokens=tokens)
    counted = counter.get_total_flops() / (2 * tokens)
    # torch also counts the part of a block of attention that is hidden.
    assert told.forward <= counted <= 1.25 * told.forward


def test_an_expert_more_per_token_costs_its_three_products() -> None:
    two, three = (
        token_flops(tiny_architecture(num_experts_per_token=k), row_tokens=16).forward for k in (2, 3)
    )
    assert three - two == 6 * 2 * 3 * 32 * 32


def test_the_matrix_rate_is_a_rate() -> None:
    rate = matmul_rate(device=torch.device("cpu"), dtype=torch.float32)
    assert 1e8 < rate < 1e16


PROGRAM = """
import dataclasses, resource
from pathlib import Path
from tests.train.models import noise, tiny_architecture, tiny_recipe
from twoends.train.loop import Run
recipe = dataclasses.replace(
    tiny_recipe(batch_rows=16, micro_rows=%d, row_tokens=256, recompute=%s),
    model=tiny_architecture(hidden_size=128, intermediate_size=256),
)
run = Run(recipe, noise(rows=20, tokens=256), Path("unused"))
stated = run.memory()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
run.step()
run.step()
print(stated.total, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before)
"""


@pytest.mark.timeout(240)
@pytest.mark.parametrize("recompute", [False, True])
def test_a_step_stays_within_the_memory_that_was_stated(recompute: bool) -> None:
    # Blocks of 128 KB and more go back to the system when they are freed, so the peak is what was in use.
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "131072"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM % (8, recompute)], env=os.environ | environment, timeout=100,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    stated, grown = map(int, done.stdout.split())
    # 25 MB of torch's code is read by the first step.
    assert grown <= stated + 25e6


def test_activations_grow_with_the_rows_of_a_part_and_shrink_when_computed_again(tmp_path: Path) -> None:
    def activations(**changes: object) -> int:
        recipe = tiny_recipe(batch_rows=8, row_tokens=64, **changes)
        return Run(recipe, noise(tokens=64), tmp_path).memory().activations

    assert activations(micro_rows=8) == 8 * activations(micro_rows=1)
    assert activations(micro_rows=1, recompute=True) < activations(micro_rows=1) / 2


def test_more_rows_of_a_part_cost_the_head_only_their_gradients(tmp_path: Path) -> None:
    def head(**changes: object) -> int:
        recipe = tiny_recipe(batch_rows=64, row_tokens=256, **changes)
        return Run(recipe, noise(tokens=256), tmp_path).memory().head

    one = head(micro_rows=32)
    # All logits of 32 rows more are 20 MB.
    assert head(micro_rows=64) - one == 32 * 256 * 32 * 4
    assert head(micro_rows=32, mtp=True) == 2 * one


def test_every_part_of_the_memory_of_a_step_is_told(tmp_path: Path) -> None:
    run = Run(tiny_recipe(), noise(), tmp_path)
    memory = step_memory(
        run.model, run.recipe, world=1, row_loss=lambda: run._loss_sum(run.text.rows[:1].astype("int64"))
    )
    assert min(dataclasses.astuple(memory)) > 0
    assert memory.weights == sum(4 * p.numel() for p in run.model.parameters())
