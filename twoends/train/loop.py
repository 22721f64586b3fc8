"""The training loop: AdamW on packed rows, the same bits from the same recipe, killed and resumed or not."""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from twoends.errors import OptionError
from twoends.train.model import KimiK3
from twoends.train.recipe import Recipe, TrainRecipe
from twoends.train.rows import Ids, batch, heldout_batches

SNAPSHOT = "snapshot.pt"
LOSSES = "loss.jsonl"
# Steps that the shown speed is an average of.
_SPEED_STEPS = 20
_DTYPES = {"float32": None, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What one step tells: training loss, bits per byte of its text, speed, router balance, time left."""

    step: int
    steps: int
    loss_nats: float
    bits_per_byte: float
    learning_rate: float
    gradient_norm: float
    max_violation: float
    tokens_per_s: float
    left_s: float

    def line(self) -> str:
        """One line for a log."""
        return (
            f"step {self.step}/{self.steps}  loss {self.loss_nats:.4f}  bits/byte {self.bits_per_byte:.4f}  "
            f"lr {self.learning_rate:.2e}  grad {self.gradient_norm:.2f}  maxvio {self.max_violation:.2f}  "
            f"{self.tokens_per_s:,.0f} tokens/s  {self.left_s / 60:.1f} min left"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """The text of a run: training rows, held-out rows by source, and the bytes behind each id."""

    rows: Ids
    heldout: dict[str, Ids]
    bytes_of_id: npt.NDArray[np.int64]


def learning_rate(recipe: TrainRecipe, step: int) -> float:
    """Linear warm-up, then half a cosine from learning_rate to final_learning_rate."""
    if step < recipe.warmup_steps:
        return recipe.learning_rate * (step + 1) / recipe.warmup_steps
    done = (step - recipe.warmup_steps) / max(1, recipe.steps - recipe.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    return recipe.final_learning_rate + (recipe.learning_rate - recipe.final_learning_rate) * cosine


def make_optimizer(model: KimiK3, recipe: TrainRecipe) -> torch.optim.AdamW:
    """AdamW; only matrices decay (not norms, biases, gates of decay, filters, depth queries)."""
    decayed: list[torch.nn.Parameter] = []
    plain: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        matrix = parameter.ndim >= 2 and "conv1d" not in name and "res_proj" not in name
        (decayed if matrix else plain).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": recipe.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    betas = (recipe.beta1, recipe.beta2)
    return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=betas, eps=1e-10, fused=True)


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary file beside `path`, flush it to the disk, then give it the name."""
    partial = path.with_name(path.name + ".partial")
    write(partial)
    with partial.open("rb+") as handle:
        os.fsync(handle.fileno())
    partial.replace(path)


def _need_compiler() -> None:
    """TorchInductor builds its kernels with a C++ compiler and fails late, and at length, without one."""
    names = [os.environ["CXX"]] if "CXX" in os.environ else ["g++", "clang++", "c++"]
    if not any(shutil.which(name) for name in names):
        raise OptionError(
            f"The recipe says compile = true, but there is no C++ compiler ({', '.join(names)}).",
            remedies=[
                "Install one (Debian, Ubuntu: apt install g++), or set compile = false: slower, no kernels."
            ],
        )


class Run:
    """A model in training: `step` advances it; `save` and `restore` carry it over a kill, bit by bit."""

    def __init__(self, recipe: Recipe, text: Text, out_dir: Path) -> None:
        if recipe.train.matmul_dtype not in _DTYPES:
            raise OptionError(
                f"matmul_dtype is {recipe.train.matmul_dtype!r}; known are {', '.join(_DTYPES)}."
            )
        self.recipe, self.text, self.out_dir = recipe, text, out_dir
        self.model = KimiK3(recipe.model).initialise(recipe.train.seed)
        self.model.multiply_in(_DTYPES[recipe.train.matmul_dtype])
        if recipe.train.compile:
            _need_compiler()
            self.model.compile_parts()
        self.optimizer = make_optimizer(self.model, recipe.train)
        self.done_steps = 0
        self.losses: list[dict[str, Any]] = []

    def step(self) -> dict[str, Any]:
        """One update; returns its record (the line of loss.jsonl)."""
        train, step = self.recipe.train, self.done_steps
        ids_np = batch(self.text.rows, step=step, batch_rows=train.batch_rows, seed=train.seed)
        ids = torch.from_numpy(ids_np)
        rate = learning_rate(train, step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.model.train()
        loss = self.model.loss(ids[:, :-1], ids[:, 1:], ignore=-1)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), train.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        violation = max(
            (router.rebalance(keep=train.router_bias_keep) for router in self.model.routers()), default=0.0
        )
        self.done_steps += 1
        bits = loss.item() * (ids_np.size - len(ids_np)) / math.log(2)
        record = {
            "step": self.done_steps,
            "loss_nats": loss.item(),
            "bits_per_byte": bits / int(self.text.bytes_of_id[ids_np[:, 1:]].sum()),
            "learning_rate": rate,
            "gradient_norm": norm.item(),
            "max_violation": violation,
        }
        self.losses.append(record)
        return record

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Held-out bits per byte of each source."""
        self.model.eval()
        result = {}
        for source, rows in self.text.heldout.items():
            nats, size = 0.0, 0
            for ids_np in heldout_batches(rows, batch_rows=self.recipe.train.batch_rows):
                ids = torch.from_numpy(ids_np)
                nats += self.model.loss(ids[:, :-1], ids[:, 1:], ignore=-1).item() * ids[:, 1:].numel()
                size += int(self.text.bytes_of_id[ids_np[:, 1:]].sum())
            result[source] = nats / math.log(2) / size
        return result

    def save(self) -> None:
        """Write the snapshot and the loss curve, each whole or not at all."""
        state = {
            "recipe": asdict(self.recipe),
            "done_steps": self.done_steps,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "losses": self.losses,
        }
        self.out_dir.mkdir(parents=True, exist_ok=True)
        write_atomically(self.out_dir / SNAPSHOT, lambda path: torch.save(state, path))
        lines = "".join(json.dumps(record) + "\n" for record in self.losses)
        write_atomically(self.out_dir / LOSSES, lambda path: path.write_text(lines, encoding="utf-8"))

    def restore(self) -> None:
        """Continue from the snapshot in out_dir. A snapshot of another model is refused."""
        path = self.out_dir / SNAPSHOT
        if not path.is_file():
            raise OptionError(f"there is no snapshot to resume from at {path}.")
        state = torch.load(path, weights_only=True)
        if state["recipe"]["model"] != asdict(self.recipe.model):
            raise OptionError(f"the snapshot {path} was made by a recipe with another [model].")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.done_steps, self.losses = state["done_steps"], state["losses"]


def train(
    run: Run,
    *,
    should_stop: Callable[[], bool] = lambda: False,
    on_progress: Callable[[Progress], None] = lambda _: None,
    on_evaluation: Callable[[dict[str, float]], None] = lambda _: None,
) -> bool:
    """Take `run` to its last step, with a snapshot every snapshot_minutes; whether it got there.

    `should_stop` is asked between steps (a signal, a time limit); the last snapshot holds every step done.
    """
    recipe = run.recipe.train
    saved_s = before_s = time.monotonic()
    recent_s: deque[float] = deque(maxlen=_SPEED_STEPS)
    while run.done_steps < recipe.steps and not should_stop():
        record = run.step()
        now_s = time.monotonic()
        recent_s.append(now_s - before_s)
        before_s = now_s
        per_step_s = sum(recent_s) / len(recent_s)
        on_progress(
            Progress(
                **record,
                steps=recipe.steps,
                tokens_per_s=recipe.batch_rows * recipe.row_tokens / per_step_s,
                left_s=(recipe.steps - run.done_steps) * per_step_s,
            )
        )
        if now_s - saved_s > recipe.snapshot_minutes * 60:
            run.save()
            on_evaluation(run.evaluate())
            saved_s = before_s = time.monotonic()
    run.save()
    on_evaluation(run.evaluate())
    return run.done_steps >= recipe.steps
