"""What one step holds, told before it runs: weights, gradients, optimiser, activations, the head's work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from twoends.train.head_loss import head_bytes
from twoends.train.model import KimiK3
from twoends.train.recipe import Recipe

_FLOAT_BYTES = 4
# Momentum, its normalised copy, and the three products that a Newton-Schulz step holds at once.
_UPDATE_COPIES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory:
    """Bytes of one rank's step that live at the same time at most, without torch itself and the text."""

    weights: int
    gradients: int
    optimiser: int
    activations: int
    head: int
    update: int

    @property
    def total(self) -> int:
        """All of it. The head's work is over before the update begins; the larger of the two counts."""
        held = self.weights + self.gradients + self.optimiser
        return held + max(self.activations + self.head, self.update)


def step_memory(model: KimiK3, recipe: Recipe, *, world: int, row_loss: Callable[[], Tensor]) -> StepMemory:
    """The bound for a recipe. `row_loss` makes one row's forward pass, whose kept tensors are counted.

    Activations grow with the rows of a part (micro_rows), not with those of a step. A compiled part keeps
    less than the plain one that is counted. These are bytes in use: a heap that is not given back in
    between (machine.py) may stand half as high again.
    """
    # Of a sharded parameter the shape is the whole's.
    sizes = [parameter.numel() * _FLOAT_BYTES for parameter in model.parameters()]
    held = -(-sum(sizes) // world)
    tokens = recipe.train.micro_rows * recipe.train.row_tokens
    gathered = 0 if world == 1 else sum(sizes)
    kept = kept_bytes(row_loss, of=model)
    if recipe.train.recompute:
        # One layer at a time has its activations again; twice a layer's part, since layers differ.
        model.recompute_layers(False)
        kept += 2 * kept_bytes(row_loss, of=model) // recipe.model.num_hidden_layers
        model.recompute_layers(True)
    return StepMemory(
        weights=held + gathered,
        gradients=held + gathered,
        optimiser=2 * held,
        activations=kept * recipe.train.micro_rows,
        # Multi-token prediction has a loss of its own, and both wait for the way back.
        head=(2 if recipe.train.mtp else 1)
        * head_bytes(
            tokens=tokens,
            vocab=recipe.model.vocab_size,
            width=recipe.model.hidden_size,
            device=model.lm_head.weight.device,
        ),
        update=_UPDATE_COPIES * max(sizes),
    )


def kept_bytes(forward: Callable[[], Tensor], *, of: torch.nn.Module) -> int:
    """Bytes that autograd keeps of one forward pass for the backward pass; the parameters don't count."""
    own = {parameter.untyped_storage().data_ptr() for parameter in of.parameters()}
    kept: dict[int, int] = {}
    alive: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with (
        torch.compiler.set_stance("force_eager"),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t),
    ):
        forward()
    return sum(kept.values())
