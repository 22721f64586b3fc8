"""The rows of a mixture's experts: sorted by expert, multiplied where they stand, brought back to tokens.

An expert's rows fill whole blocks, and how many rows there are follows from shapes alone. Three ways to
multiply them: on CUDA torch has one product for all experts in bfloat16; on a CPU small experts meet their
rows block by block in one batched product; else each has a product of its own, and a block is one row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# torch's grouped product asks for rows of whole 16 bytes: 8 numbers in bfloat16.
_GROUPED_STEP = 8
# A block repeats its expert's matrix, so that is small; rows that fill up blocks are an eighth of all or few.
_SMALLEST_BLOCK, _LARGEST_BLOCK, _BLOCKS_PER_EXPERT, _SMALL_MATRIX = 16, 128, 8, 2**16
# In binary32 a product for each expert is as fast, but for hundreds of them that hardly have rows.
_MANY_EXPERTS, _FEW_ROWS = 64, 256
# In bfloat16 a CPU's product is compiled for its number of rows, the first time (0.5 ms) and again after a
# thousand others: numbers of rows that differ in every step are taken in steps of this, and few occur.
_ROW_STEP = 64


class ExpertRows(NamedTuple):
    """Where the N*S choices of N tokens stand once they are sorted by expert: R rows, R / block blocks."""

    choice_R: Tensor  # which choice each row is, its token being choice // S; -1: none, a row of zeros
    row_NS: Tensor  # which row each choice is
    end_E: Tensor  # int32: the blocks of expert e end before this row, and those of expert e + 1 begin
    block: int


def block_rows(choices: int, weight_EFK: Tensor, *, dtype: torch.dtype) -> int:
    """Rows of a block: more than one on a CPU, for small matrices in bfloat16 or for many experts."""
    experts, *size = weight_EFK.shape
    mean_rows = choices // experts
    one_by_one = dtype != torch.bfloat16 and (experts < _MANY_EXPERTS or mean_rows >= _FEW_ROWS)
    if weight_EFK.is_cuda or one_by_one or size[0] * size[1] > _SMALL_MATRIX:
        return 1
    block = _SMALLEST_BLOCK
    while block < _LARGEST_BLOCK and 2 * block * _BLOCKS_PER_EXPERT <= mean_rows:
        block *= 2
    return block


def expert_rows(chosen_NS: Tensor, *, num_experts: int, block: int = 1) -> ExpertRows:
    """Rows for every choice. Inside an expert the order of tokens is kept; its last block ends in zeros."""
    expert_C, choice_C = chosen_NS.flatten().sort(stable=True)
    experts = torch.arange(num_experts, device=expert_C.device)
    counted_E = torch.searchsorted(expert_C, experts, right=True)
    count_E = counted_E.diff(prepend=counted_E.new_zeros(1))
    end_E = ((count_E + block - 1) // block * block).cumsum(0)
    # The last choices of an expert and the end of its blocks move apart from one expert to the next.
    gaps_E = (end_E - counted_E) - (-count_E % block)
    row_C = torch.arange(len(expert_C), device=expert_C.device) + gaps_E[expert_C]
    rows = (len(expert_C) + num_experts * (block - 1)) // block * block
    choice_R = torch.full((rows,), -1, device=expert_C.device).scatter_(0, row_C, choice_C)
    row_NS = torch.empty_like(choice_C).scatter_(0, choice_C, row_C).view_as(chosen_NS)
    return ExpertRows(choice_R, row_NS, end_E.int(), block)


def _at(x_NZ: Tensor, places: Tensor) -> Tensor:
    """x [N,Z] at `places` [...]; zeros where that is -1."""
    return torch.where((places >= 0)[..., None], x_NZ[places.clamp_min(0)], 0)


class _Gather(torch.autograd.Function):
    """x [N,Z] -> x at from_R [R,Z]; to_NS [N,S] are the places that each x went to.

    The gradient adds them up in that order. That of an index would add in the order threads come by.
    """

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, x_NZ: Tensor, from_R: Tensor, to_NS: Tensor
    ) -> Tensor:
        ctx.save_for_backward(to_NS)
        return _at(x_NZ, from_R)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[Tensor, None, None]:
        (to_NS,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return _at(grads[0], to_NS).sum(1), None, None


def to_experts(x_NZ: Tensor, rows: ExpertRows) -> Tensor:
    """What each token is, in each of its rows [R,Z]."""
    return _Gather.apply(x_NZ, rows.choice_R // rows.row_NS.shape[1], rows.row_NS)


def to_tokens(y_RZ: Tensor, rows: ExpertRows) -> Tensor:
    """What each row is, at its choice [N,S,Z]."""
    y = _Gather.apply(y_RZ, rows.row_NS.flatten(), rows.choice_R[:, None])
    return y.unflatten(0, rows.row_NS.shape)


def multiply(x_RK: Tensor, weight_EFK: Tensor, rows: ExpertRows) -> Tensor:
    """y [R,F]: the rows of expert e times the transpose of weight e."""
    return expert_products(x_RK, weight_EFK, rows.end_E, rows.block, True)


# A compiler doesn't look into the two operators: how many rows an expert has is known only there.
@torch.library.custom_op("twoends::expert_products", mutates_args=())
def expert_products(x_RK: Tensor, weight_EFK: Tensor, end_E: Tensor, block: int, transpose: bool) -> Tensor:
    """Rows of expert e times its weight, [R,F] -> [R,K]; with `transpose` times that's transpose, back."""
    factor = weight_EFK.mT if transpose else weight_EFK
    if _multiplies_at_once(x_RK, factor.shape[2]):
        return F.grouped_mm(x_RK, factor, offs=end_E)
    if block > 1:
        starts = torch.arange(0, len(x_RK), block, device=x_RK.device)
        expert_B = torch.searchsorted(end_E, starts, right=True).clamp_max(len(end_E) - 1)
        weight_BFK = weight_EFK.index_select(0, expert_B)
        blocks = x_RK.unflatten(0, (-1, block))
        return torch.bmm(blocks, weight_BFK.mT if transpose else weight_BFK).flatten(0, 1)
    y_RF = x_RK.new_empty(len(x_RK), factor.shape[2])
    sizes = _sizes(end_E)
    for x, of_expert, y in zip(x_RK.split(sizes), factor, y_RF.split(sizes), strict=True):
        odd = _odd_rows(x)
        torch.mm(x[: len(x) - odd], of_expert, out=y[: len(x) - odd])
        if odd:
            # Rows of the step before fill this one up, and are written again.
            torch.mm(x[-_ROW_STEP:], of_expert, out=y[-_ROW_STEP:])
    return y_RF


@torch.library.custom_op("twoends::expert_weight_gradients", mutates_args=())
def expert_weight_gradients(grad_RF: Tensor, x_RK: Tensor, end_E: Tensor) -> Tensor:
    """[E,F,K]: the transpose of grad times x over the rows of each expert; zeros for one without rows."""
    if _multiplies_at_once(x_RK, grad_RF.shape[1]):
        weight_EFK = F.grouped_mm(grad_RF.mT, x_RK, offs=end_E)
        # Not every device writes the product of no rows.
        empty_E = end_E.diff(prepend=end_E.new_zeros(1)) == 0
        return weight_EFK.masked_fill_(empty_E[:, None, None], 0)
    weight_EFK = x_RK.new_empty(len(end_E), grad_RF.shape[1], x_RK.shape[1])
    sizes = [*_sizes(end_E), len(x_RK) - int(end_E[-1])]
    # The last piece, after all blocks, has no expert.
    for grad, x, weight in zip(grad_RF.split(sizes), x_RK.split(sizes), weight_EFK, strict=False):
        odd = _odd_rows(x)
        if odd:
            grad, x = (F.pad(rows, (0, 0, 0, _ROW_STEP - odd)) for rows in (grad, x))
        torch.mm(grad.mT, x, out=weight)
    return weight_EFK


def _multiplies_at_once(x_RK: Tensor, outputs: int) -> bool:
    """Whether torch has one product for all experts here, which needs no counts on the host."""
    aligned = x_RK.shape[1] % _GROUPED_STEP == outputs % _GROUPED_STEP == 0
    return x_RK.is_cuda and x_RK.dtype == torch.bfloat16 and aligned and hasattr(F, "grouped_mm")


def _odd_rows(x: Tensor) -> int:
    """Rows over a whole number of steps, where only whole numbers are wanted; else 0."""
    return len(x) % _ROW_STEP if x.dtype == torch.bfloat16 and not x.is_cuda and len(x) > _ROW_STEP else 0


def _sizes(end_E: Tensor) -> list[int]:
    return end_E.diff(prepend=end_E.new_zeros(1)).tolist()


@expert_products.register_fake
def _(x_RK: Tensor, weight_EFK: Tensor, end_E: Tensor, block: int, transpose: bool) -> Tensor:
    return x_RK.new_empty(len(x_RK), weight_EFK.shape[1 if transpose else 2])


@expert_weight_gradients.register_fake
def _(grad_RF: Tensor, x_RK: Tensor, end_E: Tensor) -> Tensor:
    return x_RK.new_empty(len(end_E), grad_RF.shape[1], x_RK.shape[1])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.block, ctx.transpose = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
    x, weight_EFK, end_E = ctx.saved_tensors
    grad = grad.contiguous()
    x_grad = weight_grad = None
    if ctx.needs_input_grad[0]:
        x_grad = expert_products(grad, weight_EFK, end_E, ctx.block, not ctx.transpose)
    if ctx.needs_input_grad[1]:
        pair = (grad, x) if ctx.transpose else (x, grad)
        weight_grad = expert_weight_gradients(*pair, end_E)
    return x_grad, weight_grad, None, None, None


expert_products.register_autograd(_gradients, setup_context=_keep)
