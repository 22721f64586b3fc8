"""The training of a draft layer for a frozen model: one forward pass of the model, one update of each layer.

The same bits from the same recipe, killed and resumed or not, like loop.py.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from twoends.train.draft_layer import DraftLayer, target_states, visible_bases
from twoends.train.draft_loss import LOSSES
from twoends.train.draft_recipe import DraftRecipe
from twoends.train.loop import write_text_atomically
from twoends.train.model import KimiK3
from twoends.train.optimiser import learning_rate_at, make_optimiser
from twoends.train.pace import Pace
from twoends.train.packing import documents_of_rows
from twoends.train.ranks import one_rank
from twoends.train.rows import Ids, batch
from twoends.train.snapshot import read_snapshot, snapshot_to_resume, write_snapshot

LOSSES_FILE = "loss.jsonl"
_DTYPES = {"float32": None, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftText:
    """Training rows, and held-out rows by source."""

    rows: Ids
    heldout: dict[str, Ids]


class DraftBatch:
    """What a frozen model makes of some rows, and which guesses on them count."""

    def __init__(self, target: KimiK3, ids_BT1: npt.NDArray[np.int64], *, features: tuple[str, ...]) -> None:
        self.ids_BT1 = torch.from_numpy(ids_BT1)
        self.inputs_BT = self.ids_BT1[:, :-1]
        self._eos = target.arch.eos_token_id
        self.documents_BT = documents_of_rows(self.inputs_BT, eos=self._eos)
        self.features, self.p_BTW = target_states(
            target, self.inputs_BT, self.documents_BT, features=features
        )
        with torch.no_grad():
            self.embeddings_BTD = target.model.embed_tokens(self.inputs_BT)
        self.seen_BTT = visible_bases(self.documents_BT)

    def counted(self, step: int) -> Tensor:
        """Bases [B, T - 1 - step] whose guess counts: the document goes on for that long."""
        ahead = 1 + step
        same = self.documents_BT[:, ahead:] == self.documents_BT[:, :-ahead]
        return same & (self.inputs_BT[:, ahead:] != self._eos)

    def expected(self, step: int) -> Tensor:
        """The model's own distribution [N,W] where the counted guesses of a step are tested."""
        return self.p_BTW[:, 1 + step :][self.counted(step)]

    def text(self, step: int) -> Tensor:
        """The text's own tokens [N] there."""
        return self.ids_BT1[:, 2 + step :][self.counted(step)]


class DraftRun:
    """Layers in training, one for each loss; `save` and `restore` carry them over a kill, bit by bit."""

    def __init__(
        self, recipe: DraftRecipe, target: KimiK3, text: DraftText, out_dir: Path, *, identity: dict[str, str]
    ) -> None:
        """`identity` tells the target apart: a snapshot made for another is refused."""
        self.recipe, self.target, self.text, self.out_dir = recipe, target, text, out_dir
        self._identity = identity
        target.eval().requires_grad_(False)
        # The loaded numbers are those of the file; rounding them again would only cost time.
        target.quantise_experts(weights="none", activations="none")
        self.layers = nn.ModuleDict({loss: self._new_layer() for loss in recipe.draft.losses})
        train = recipe.train
        self.optimiser = make_optimiser(
            self.layers,
            kind=train.optimiser,
            learning_rate=train.learning_rate,
            weight_decay=train.weight_decay,
            beta1=train.beta1,
            beta2=train.beta2,
            momentum=train.momentum,
            matmul_dtype=_DTYPES[train.matmul_dtype],
        )
        self.done_steps = 0
        self.losses: list[dict[str, Any]] = []

    def _new_layer(self) -> DraftLayer:
        draft = self.recipe.draft
        layer = DraftLayer(self.target.arch, num_features=len(draft.features), mlp_width=draft.mlp_width)
        layer.initialise(self.recipe.train.seed)
        return layer.multiply_in(_DTYPES[self.recipe.train.matmul_dtype])

    def step(self) -> dict[str, Any]:
        """One update of every layer; returns its record (the line of loss.jsonl)."""
        train = self.recipe.train
        rate = learning_rate_at(
            self.done_steps,
            steps=train.steps,
            peak=train.learning_rate,
            final=train.final_learning_rate,
            warmup_share=train.warmup_share,
        )
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        ids_BT1 = batch(self.text.rows, step=self.done_steps, batch_rows=train.batch_rows, seed=train.seed)
        taught = DraftBatch(self.target, ids_BT1, features=self.recipe.draft.features)
        record: dict[str, Any] = {"step": self.done_steps + 1, "learning_rate": rate}
        for name, layer in self.layers.items():
            loss = self.loss(layer, taught, name=name)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(layer.parameters(), train.clip_norm)
            record |= {f"{name}_nats": loss.item(), f"{name}_gradient_norm": float(norm)}
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        self.done_steps += 1
        self.losses.append(record)
        return record

    def logits(self, layer: DraftLayer, taught: DraftBatch) -> list[Tensor]:
        """Of the counted guesses of each unrolled step, [N,W]; the head is the target's."""
        states = layer.unrolled(
            taught.features, taught.embeddings_BTD, taught.seen_BTT, steps=self.recipe.draft.unrolled_steps
        )
        head = self.target.lm_head.weight
        dtype = _DTYPES[self.recipe.train.matmul_dtype] or head.dtype
        return [
            nn.functional.linear(state[taught.counted(s)].to(dtype), head.to(dtype)).float()
            for s, state in enumerate(states)
        ]

    def loss(self, layer: DraftLayer, taught: DraftBatch, *, name: str) -> Tensor:
        """The mean over the counted guesses of each step, and over the steps."""
        function = LOSSES[name]
        means = [
            function(logits, taught.expected(s), taught.text(s)).mean()
            for s, logits in enumerate(self.logits(layer, taught))
        ]
        return torch.stack(means).mean()

    def save(self) -> None:
        """Write the snapshot and the loss curve, each whole or not at all."""
        self.out_dir.mkdir(parents=True, exist_ok=True)
        write_snapshot(
            self.out_dir,
            recipe=self._record(),
            done_steps=self.done_steps,
            losses=self.losses,
            model=self.layers,
            optimiser=self.optimiser,
            ranks=one_rank(),
        )
        lines = "".join(json.dumps(record) + "\n" for record in self.losses)
        write_text_atomically(self.out_dir / LOSSES_FILE, lines)

    def restore(self) -> None:
        """Continue from the newest whole snapshot in out_dir. One of another draft or target is refused."""
        path = snapshot_to_resume(self.out_dir)
        self.done_steps, self.losses = read_snapshot(
            path,
            recipe=self._record(),
            same=("target", "draft", "optimiser"),
            model=self.layers,
            optimiser=self.optimiser,
            ranks=one_rank(),
        )

    def _record(self) -> dict[str, Any]:
        return {"target": self._identity, **asdict(self.recipe)}


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftProgress:
    """What one step tells: the exported layer's loss, speed, time left."""

    step: int
    steps: int
    loss_nats: float
    tokens_per_s: float
    left_s: float


def train_draft(
    run: DraftRun,
    *,
    should_stop: Callable[[], bool] = lambda: False,
    on_progress: Callable[[DraftProgress], None] = lambda _: None,
    on_snapshot: Callable[[], None] = lambda: None,
) -> bool:
    """Take `run` to its last step, with a snapshot every snapshot_minutes; whether it got there."""
    recipe = run.recipe.train
    saved_s, pace = time.monotonic(), Pace()
    while run.done_steps < recipe.steps and not should_stop():
        record = run.step()
        per_step_s = pace.step_done()
        on_progress(
            DraftProgress(
                step=run.done_steps,
                steps=recipe.steps,
                loss_nats=record[f"{run.recipe.draft.losses[0]}_nats"],
                tokens_per_s=recipe.batch_rows * recipe.row_tokens / per_step_s,
                left_s=(recipe.steps - run.done_steps) * per_step_s,
            )
        )
        if time.monotonic() - saved_s > recipe.snapshot_minutes * 60:
            run.save()
            on_snapshot()
            saved_s = time.monotonic()
            pace.go_on()
    run.save()
    return run.done_steps >= recipe.steps
