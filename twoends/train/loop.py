"""The training loop: packed rows in, the same bits from the same recipe, killed and resumed or not."""

from __future__ import annotations

import json
import math
import os
import resource
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.tensor import DTensor

from twoends.errors import OptionError
from twoends.train.balance import rebalance
from twoends.train.kda_choice import choose_kda
from twoends.train.memory import StepMemory, step_memory
from twoends.train.mla import GatedLatentAttention
from twoends.train.model import KimiK3
from twoends.train.optimiser import learning_rate_at, make_optimiser
from twoends.train.pace import Pace
from twoends.train.packing import documents_of_rows
from twoends.train.qk_clip import clip_attention
from twoends.train.ranks import Ranks, one_rank
from twoends.train.recipe import Recipe, TrainRecipe, check_choices
from twoends.train.rows import IGNORE, Ids, batch, heldout_batches, inputs_and_targets
from twoends.train.snapshot import read_snapshot, snapshot_to_resume, write_snapshot

LOSSES = "loss.jsonl"
_DTYPES = {"float32": None, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What one step tells: training loss, bits per byte of its text, router balance, speed, memory.

    `max_violation` is the worst layer's, `violation_floor` what chance alone gives it; `attention_logit`
    the largest of the MLA layers before clipping (0 where nothing clips).
    """

    step: int
    steps: int
    loss_nats: float
    bits_per_byte: float
    learning_rate: float
    gradient_norm: float
    max_violation: float
    violation_floor: float
    attention_logit: float
    tokens_per_s: float
    left_s: float
    peak_bytes: int

    def line(self) -> str:
        """One line for a log."""
        return (
            f"step {self.step}/{self.steps}  loss {self.loss_nats:.4f}  bits/byte {self.bits_per_byte:.4f}  "
            f"lr {self.learning_rate:.2e}  grad {self.gradient_norm:.2f}  maxvio {self.max_violation:.2f}  "
            f"{self.tokens_per_s:,.0f} tokens/s  {self.peak_bytes / 1e6:,.0f} MB  "
            f"{self.left_s / 60:.1f} min left"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """The text of a run: training rows, held-out rows by source, and the bytes behind each id."""

    rows: Ids
    heldout: dict[str, Ids]
    bytes_of_id: npt.NDArray[np.int64]


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary file beside `path`, flush it to the disk, then give it the name."""
    partial = path.with_name(path.name + ".partial")
    write(partial)
    with partial.open("rb+") as handle:
        os.fsync(handle.fileno())
    partial.replace(path)


def write_text_atomically(path: Path, text: str) -> None:
    """`write_atomically` for a text in UTF-8."""
    write_atomically(path, lambda partial: partial.write_text(text, encoding="utf-8"))


def peak_bytes(device: torch.device) -> int:
    """The most memory this process had: of the device if it is CUDA, else resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


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


def build_model(recipe: Recipe, ranks: Ranks) -> KimiK3:
    """The module of a recipe with its first numbers, on the device, shared out over the ranks."""
    train = recipe.train
    model = KimiK3(recipe.model, mtp=train.mtp).initialise(train.seed).to(ranks.device)
    model.multiply_in(_DTYPES[train.matmul_dtype])
    model.quantise_experts(weights=train.expert_weights, activations=train.expert_activations)
    model.balance_by(train.balance, auxiliary_weight=train.auxiliary_weight)
    model.use_kda(choose_kda(ranks.device))
    model.recompute_layers(train.recompute)
    if train.compile:
        _need_compiler()
        model.compile_parts()
    ranks.shard(model)
    return model


class Run:
    """A model in training: `step` advances it; `save` and `restore` carry it over a kill, bit by bit."""

    def __init__(self, recipe: Recipe, text: Text, out_dir: Path, *, ranks: Ranks | None = None) -> None:
        check_choices(recipe.train)
        self.ranks = ranks or one_rank()
        self.recipe, self.text, self.out_dir = recipe, text, out_dir
        self._rows = self.ranks.rows(recipe.train.batch_rows)
        self.model = build_model(recipe, self.ranks)
        self.optimiser = _optimiser(self.model, recipe.train)
        self.done_steps = 0
        self.losses: list[dict[str, Any]] = []

    def step(self) -> dict[str, Any]:
        """One update; returns its record (the line of loss.jsonl)."""
        train, step = self.recipe.train, self.done_steps
        rate = learning_rate_at(
            step,
            steps=train.steps,
            peak=train.learning_rate,
            final=train.final_learning_rate,
            warmup_share=train.warmup_share,
        )
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        ids_BT1 = batch(self.text.rows, step=step, batch_rows=train.batch_rows, seed=train.seed)
        mean_nats, bits_per_byte = self._gradients(ids_BT1)
        norm = float(_gathered(torch.nn.utils.clip_grad_norm_(self.model.parameters(), train.clip_norm)))
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        logit = 0.0
        if train.qk_clip > 0:
            logit = max(logit, clip_attention(self.model, threshold=train.qk_clip, group=self.ranks.group))
        layers = rebalance(
            self.model.routers(),
            method=train.balance,
            keep=train.router_bias_keep,
            sign_rate=train.sign_rate,
            group=self.ranks.group,
        )
        worst = max(layers, key=lambda layer: layer.max_violation, default=None)
        self.done_steps += 1
        record = {
            "step": self.done_steps,
            "loss_nats": mean_nats,
            "bits_per_byte": bits_per_byte,
            "learning_rate": rate,
            "gradient_norm": norm,
            "max_violation": worst.max_violation if worst else 0.0,
            "violation_floor": worst.floor if worst else 0.0,
            "attention_logit": logit,
        }
        self.losses.append(record)
        return record

    def _gradients(self, ids_BT1: npt.NDArray[np.int64]) -> tuple[float, float]:
        """Gradients of the mean loss over all targets of the step; that mean, and bits per byte.

        Every rank and every part is divided by the targets of the whole step, so a token weighs the
        same wherever it stands.
        """
        train, ranks = self.recipe.train, self.ranks
        _, targets_BT = self._inputs_and_targets(ids_BT1)
        num_targets = int((targets_BT != IGNORE).sum())
        mine = ids_BT1[self._rows]
        nats = torch.zeros((), dtype=torch.float64, device=ranks.device)
        self.model.train()
        for start in range(0, len(mine), train.micro_rows):
            ranks.sync_gradients(self.model, start + train.micro_rows >= len(mine))
            loss = self._loss_sum(mine[start : start + train.micro_rows])
            # FSDP2 takes the mean over ranks; a sum is wanted.
            (loss * (ranks.world / num_targets)).backward()
            nats += loss.detach()
        total = ranks.total(nats)
        return total / num_targets, total / math.log(2) / self._target_bytes(targets_BT)

    def _inputs_and_targets(
        self, ids_BT1: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        return inputs_and_targets(ids_BT1, eos=self.recipe.model.eos_token_id)

    def _target_bytes(self, targets_BT: npt.NDArray[np.int64]) -> int:
        return int(self.text.bytes_of_id[targets_BT[targets_BT != IGNORE]].sum())

    def _loss_sum(self, ids_BT1: npt.NDArray[np.int64]) -> torch.Tensor:
        """Nats of all targets of these rows, summed."""
        inputs_BT, targets_BT = (
            torch.from_numpy(part).to(self.ranks.device) for part in self._inputs_and_targets(ids_BT1)
        )
        documents_BT = None
        if self.recipe.train.pack_documents:
            documents_BT = documents_of_rows(inputs_BT, eos=self.recipe.model.eos_token_id)
        return self.model.loss_sum(inputs_BT, targets_BT, ignore=IGNORE, documents_BT=documents_BT)

    def memory(self) -> StepMemory:
        """What a step of this rank holds at most; one row goes forward to find out, before the first step."""
        self.model.train()
        row = self.text.rows[:1].astype(np.int64)
        stated = step_memory(
            self.model, self.recipe, world=self.ranks.world, row_loss=lambda: self._loss_sum(row)
        )
        for router in self.model.routers():
            router.take_counts()
        for layer in self.model.model.layers:
            if isinstance(layer.self_attn, GatedLatentAttention):
                layer.self_attn.forget_logits()
        return stated

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Held-out bits per byte of each source. Every rank computes all: nothing depends on their number."""
        self.model.eval()
        result = {}
        for source, rows in self.text.heldout.items():
            nats, size = 0.0, 0
            for ids_BT1 in heldout_batches(rows, batch_rows=self.recipe.train.micro_rows):
                nats += self._loss_sum(ids_BT1).item()
                size += self._target_bytes(self._inputs_and_targets(ids_BT1)[1])
            result[source] = nats / math.log(2) / size
        return result

    def evaluate_as_stored(self) -> dict[str, float]:
        """`evaluate` with the experts as the export stores them: the same where they are trained so."""
        train = self.recipe.train
        self.model.quantise_experts(weights="mxfp4", activations=train.expert_activations)
        found = self.evaluate()
        self.model.quantise_experts(weights=train.expert_weights, activations=train.expert_activations)
        return found

    def whole_model(self) -> KimiK3:
        """The model on the CPU with all its numbers, for the export; all ranks call it together."""
        if self.ranks.world == 1 and self.ranks.device.type == "cpu":
            return self.model
        state = {name: _gathered(tensor).cpu() for name, tensor in self.model.state_dict().items()}
        whole = KimiK3(self.recipe.model, mtp=self.recipe.train.mtp)
        whole.load_state_dict(state)
        return whole

    def save(self) -> None:
        """Write the snapshot and the loss curve, each whole or not at all."""
        if self.ranks.is_first:
            self.out_dir.mkdir(parents=True, exist_ok=True)
        self.ranks.wait()
        write_snapshot(
            self.out_dir,
            recipe=asdict(self.recipe),
            done_steps=self.done_steps,
            losses=self.losses,
            model=self.model,
            optimiser=self.optimiser,
            ranks=self.ranks,
        )
        if self.ranks.is_first:
            lines = "".join(json.dumps(record) + "\n" for record in self.losses)
            write_text_atomically(self.out_dir / LOSSES, lines)

    def restore(self) -> None:
        """Continue from the newest whole snapshot in out_dir. One of another model is refused."""
        path = snapshot_to_resume(self.out_dir)
        self.done_steps, self.losses = read_snapshot(
            path,
            recipe=asdict(self.recipe),
            same=("model", "optimiser", "mtp"),
            model=self.model,
            optimiser=self.optimiser,
            ranks=self.ranks,
        )


def _optimiser(model: KimiK3, train: TrainRecipe) -> torch.optim.Optimizer:
    return make_optimiser(
        model,
        kind=train.optimiser,
        learning_rate=train.learning_rate,
        weight_decay=train.weight_decay,
        beta1=train.beta1,
        beta2=train.beta2,
        momentum=train.momentum,
        matmul_dtype=_DTYPES[train.matmul_dtype],
    )


def _gathered(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that may be spread over ranks, in one piece."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train(
    run: Run,
    *,
    should_stop: Callable[[], bool] = lambda: False,
    on_progress: Callable[[Progress], None] = lambda _: None,
    on_snapshot: Callable[[dict[str, float]], None] = lambda _: None,
) -> bool:
    """Take `run` to its last step, with a snapshot every snapshot_minutes; whether it got there.

    `should_stop` is asked between steps (a signal, a time limit); the last snapshot holds every step done.
    `on_snapshot` gets the held-out bits per byte.
    """
    recipe, ranks = run.recipe.train, run.ranks
    saved_s, pace = time.monotonic(), Pace()
    while run.done_steps < recipe.steps and not ranks.agree(should_stop()):
        record = run.step()
        per_step_s = pace.step_done()
        on_progress(
            Progress(
                **record,
                steps=recipe.steps,
                tokens_per_s=recipe.batch_rows * recipe.row_tokens / per_step_s,
                left_s=(recipe.steps - run.done_steps) * per_step_s,
                peak_bytes=peak_bytes(ranks.device),
            )
        )
        is_due = time.monotonic() - saved_s > recipe.snapshot_minutes * 60
        if run.done_steps < recipe.steps and ranks.agree(is_due):
            run.save()
            on_snapshot(run.evaluate())
            saved_s = time.monotonic()
            pace.go_on()
    run.save()
    on_snapshot(run.evaluate())
    return run.done_steps >= recipe.steps
