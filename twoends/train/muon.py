"""Muon's update: momentum made orthogonal by Newton-Schulz, whole matrices or head by head.

A full matrix gives every head the share of the update that its gradient's size wins; a head whose gradient
is a thousand times smaller hardly moves. Made orthogonal by itself, each head's block gets the same size of
update, and 0.2 sqrt(max(rows, columns)) of that block's own shape brings its RMS to 0.2, which is AdamW's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

# The quintic of K. Jordan's Muon: five steps bring singular values into .68 .. 1.13, not to one. Where in it
# they land is chance, and heads of a few rows would differ by 5 to 14 % in size; two steps of the cubic,
# which does converge to one, leave 2 % at most for the price of 4 products on top of 15.
_QUINTIC = (3.4445, -4.7750, 2.0315)
_QUINTIC_STEPS = 5
_CUBIC = (1.5, -0.5)
_CUBIC_STEPS = 2
_UPDATE_RMS = 0.2
# Matrices of one shape go through the products together, up to this many numbers at once.
_STACK_ELEMENTS = 1 << 24


def orthogonalise(stack_NRC: Tensor, *, matmul_dtype: torch.dtype | None = None) -> Tensor:
    """Each matrix of a stack [N,R,C] with its singular values moved close to one, in binary32.

    Independent of scale: only direction counts, however small the gradient. A matrix of zeros stays zero. The
    products run in `matmul_dtype` (None: binary32): bfloat16 moves a singular value by its rounding, 0.2 %.
    """
    x = stack_NRC.float()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    tiny = torch.finfo(x.dtype).tiny
    x = x / x.abs().amax((-2, -1), keepdim=True).clamp_min(tiny)
    x = x / torch.linalg.vector_norm(x, 2, (-2, -1), keepdim=True).clamp_min(tiny)
    x = x.to(matmul_dtype or x.dtype)
    a, b, c = _QUINTIC
    for _ in range(_QUINTIC_STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    a, b = _CUBIC
    for _ in range(_CUBIC_STEPS):
        x = torch.baddbmm(x, x @ x.mT, x, beta=a, alpha=b)
    return (x.mT if tall else x).float()


def blocks_of(matrix: Tensor, head_rows: tuple[int, ...]) -> list[Tensor]:
    """Views [N,R,C] of what is made orthogonal by itself.

    A stack [E,R,C] is E matrices. A matrix [R,C] is one, or, with `head_rows`, one for each part of each
    head: rows repeat in the pattern of head_rows ((32,): heads of 32 rows; (16, 32): k and v of a head).
    """
    if matrix.ndim == 3:
        return [matrix]
    if not head_rows:
        return [matrix[None]]
    return list(matrix.unflatten(0, (-1, sum(head_rows))).split(list(head_rows), dim=1))


def apply_updates(
    pairs: Sequence[tuple[Tensor, Tensor]],
    *,
    head_rows: tuple[int, ...],
    learning_rate: float,
    matmul_dtype: torch.dtype | None = None,
) -> None:
    """Subtract learning_rate times Muon's update from each weight of (weight, direction) pairs, in place."""
    by_shape: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = {}
    for weight, direction in pairs:
        for target, block in zip(blocks_of(weight, head_rows), blocks_of(direction, head_rows), strict=True):
            if block.numel():
                by_shape.setdefault((block.shape[1], block.shape[2]), []).append((target, block))
    for (rows, columns), members in by_shape.items():
        size = learning_rate * _UPDATE_RMS * math.sqrt(max(rows, columns))
        limit = max(1, _STACK_ELEMENTS // (rows * columns))
        for batch in _batches(members, limit=limit):
            update = orthogonalise(torch.cat([block for _, block in batch]), matmul_dtype=matmul_dtype)
            for (target, _), part in zip(batch, update.split([len(t) for t, _ in batch]), strict=True):
                target.add_(part.to(target.dtype), alpha=-size)


def _batches(members: list[tuple[Tensor, Tensor]], *, limit: int) -> list[list[tuple[Tensor, Tensor]]]:
    """`members` in order, in runs of at most `limit` matrices (one tensor may exceed it by itself)."""
    runs: list[list[tuple[Tensor, Tensor]]] = []
    held = 0
    for member in members:
        count = len(member[0])
        if not runs or held + count > limit:
            runs.append([])
            held = 0
        runs[-1].append(member)
        held += count
    return runs
