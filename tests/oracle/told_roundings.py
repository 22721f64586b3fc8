"""How the engine rounded the inputs of its experts, told to the trainer where a rounding was all but a tie.

Rounding to MXFP8 is a step: two right evaluations in binary32, whose sums differ in the last place, can stand
on either side of a border and then differ by up to an eighth. Nothing else that the trainer computes is told.
Imports torch; a test module skips itself before it imports this.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from twoends.kernels.composed import gated
from twoends.kernels.ops import Ops
from twoends.train.model import KimiK3
from twoends.train.moe import ExpertBank
from twoends.train.qat import E4M3, FakeQuantise


@dataclasses.dataclass(slots=True)
class LayerRoundings:
    """One layer's rounded inputs: of the tokens, and of each expert's second product in token order."""

    z_TZ: np.ndarray
    ids_TS: np.ndarray
    hidden: dict[int, np.ndarray]


class Listener:
    """Operations of a backend whose experts are its smaller operations one by one, overheard.

    That this gives the backend's own bits is in the contract (kernels/composed.py) and tested there.
    """

    def __init__(self, ops: Ops) -> None:
        self.layers: list[LayerRoundings] = []
        self.ops = dataclasses.replace(ops, expert_mlps=self._expert_mlps)
        self._small = ops
        self._input: np.ndarray | None = None

    def _expert_mlps(self, experts, z_TZ, ids_TS, glu, *, activations="f32", out_TSZ) -> None:
        assert activations == "mxfp8"
        ops = self._small
        if z_TZ is not self._input:
            self._input = z_TZ
            self.layers.append(LayerRoundings(ops.mxfp8(z_TZ), ids_TS.copy(), {}))
        layer = self.layers[-1]
        for expert, weights in experts:
            rows, ranks = np.nonzero(ids_TS == expert)
            z_NZ = np.ascontiguousarray(layer.z_TZ[rows])
            gate_NF, up_NF = (np.empty((len(rows), weights.w1.rows), np.float32) for _ in range(2))
            y_NZ = np.empty((len(rows), weights.w2.rows), np.float32)
            ops.matmul(weights.w1, z_NZ, out_TY=gate_NF, first_row=0)
            ops.matmul(weights.w3, z_NZ, out_TY=up_NF, first_row=0)
            layer.hidden[expert] = ops.mxfp8(gated(ops, gate_NF, up_NF, glu))
            ops.matmul(weights.w2, layer.hidden[expert], out_TY=y_NZ, first_row=0)
            out_TSZ[rows, ranks] = y_NZ


class Told(torch.nn.Module):
    """Rounds to MXFP8 as the engine did, provided that the input moved by `reach` of its root mean square
    would be rounded so; `num_told` counts where the input itself would not."""

    def __init__(self, layer: LayerRoundings, *, reach: float) -> None:
        super().__init__()
        self._layer, self._reach, self._round = layer, reach, FakeQuantise(E4M3)
        self._calls = 0
        self.num_told = self.num_rounded = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """First the tokens' inputs [N,Z], then the experts' hidden rows [R,F], sorted by expert."""
        self._calls += 1
        hidden = self._layer.hidden
        rows = [self._layer.z_TZ] if self._calls == 1 else [hidden[expert] for expert in sorted(hidden)]
        told = torch.from_numpy(np.concatenate(rows))
        own = self._round(x)
        step = self._reach * x.square().mean(-1, keepdim=True).sqrt()
        below, above = self._round(x - step), self._round(x + step)
        assert ((torch.minimum(below, own) <= told) & (told <= torch.maximum(above, own))).all()
        self.num_told += int((told != own).sum())
        self.num_rounded += int((x != 0).sum())
        return told


def tell(model: KimiK3, layers: list[LayerRoundings], *, reach: float) -> list[Told]:
    """Puts a Told into every bank of experts, in the order of layers."""
    banks = [module for module in model.modules() if isinstance(module, ExpertBank)]
    told = [Told(layer, reach=reach) for layer in layers]
    for bank, one in zip(banks, told, strict=True):
        bank.quantise_input = one
    return told
