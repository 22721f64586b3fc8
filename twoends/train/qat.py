"""Fake quantisation: forward sees MXFP4 weights and MXFP8 inputs, the gradient goes straight through.

Blocks of 32 numbers along the product's inner axis share a power of two 2^e, the smallest under which nothing
saturates (RCEIL, the rule that the released bytes show): e = ceil(log2(amax / 6)) for MXFP4, whose elements
are E2M1 (0, .5, 1, 1.5, 2, 3, 4, 6), and ceil(log2(amax / 448)) for MXFP8, whose elements are E4M3. Both
round to the nearest, ties to the even code, and copy the sign. No scale is below 2^-127.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from twoends.checkpoint import mxfp4
from twoends.errors import OptionError

BLOCK = 32
EXPERT_WEIGHTS = ("mxfp4", "none")
EXPERT_ACTIVATIONS = ("none", "mxfp8")
_EXPONENT_MIN, _EXPONENT_MAX = -127, 127
_FLOAT_EXPONENT_BITS = 0x7F800000

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementFormat:
    """A small float: the mantissa bits behind the point, its smallest normal power, its largest value.

    `largest` = mantissa * 2^power with mantissa in [.5, 1).
    """

    mantissa_bits: int
    smallest_power: float
    largest_power: float
    mantissa: float
    power: int


E2M1 = ElementFormat(mantissa_bits=1, smallest_power=1.0, largest_power=4.0, mantissa=0.75, power=3)
E4M3 = ElementFormat(mantissa_bits=3, smallest_power=2.0**-6, largest_power=256.0, mantissa=0.875, power=9)


def block_exponents(x: Tensor, element: ElementFormat = E2M1) -> Tensor:
    """Exponents e of the block scales 2^e. `x` [..., K] -> int32 [..., K / 32].

    The smallest e with amax <= largest * 2^e, found without a logarithm: amax = m * 2^n with m in [.5, 1). A
    block of zeros gets 0, as the checkpoint's codec gives it.
    """
    if x.shape[-1] % BLOCK:
        raise ValueError(f"MX blocks are {BLOCK} wide; the last axis of {tuple(x.shape)} isn't a multiple")
    amax = x.detach().float().unflatten(-1, (-1, BLOCK)).abs().amax(-1)
    mantissa, exponent = torch.frexp(amax)
    exponent = exponent - element.power + (mantissa > element.mantissa).to(exponent.dtype)
    exponent = torch.where(amax == 0, torch.zeros_like(exponent), exponent)
    return exponent.clamp(_EXPONENT_MIN, _EXPONENT_MAX)


def round_to(scaled: Tensor, element: ElementFormat) -> Tensor:
    """Nearest value of `element` to each binary32 number within its range, ties to the even code, sign kept.

    Adding and subtracting 1.5 * 2^23 units of the wanted last place leaves the number rounded to it.
    """
    magnitude_bits = scaled.view(torch.int32) & _FLOAT_EXPONENT_BITS
    power = magnitude_bits.view(torch.float32).clamp(min=element.smallest_power, max=element.largest_power)
    magic = power * (1.5 * 2.0 ** (23 - element.mantissa_bits))
    return torch.copysign((scaled.abs() + magic) - magic, scaled)


def quantise(x: Tensor, element: ElementFormat = E2M1) -> tuple[Tensor, Tensor]:
    """Element values (binary32) and int32 block exponents of `x` [..., K]."""
    exponent = block_exponents(x, element)
    blocks = x.detach().float().unflatten(-1, (-1, BLOCK))
    scaled = torch.ldexp(blocks, -exponent[..., None])
    return round_to(scaled.contiguous(), element).flatten(-2), exponent


def dequantise(values: Tensor, exponent: Tensor) -> Tensor:
    """Numbers of `quantise`'s pair, exact in binary32: values [..., K] times 2^exponent [..., K / 32]."""
    return torch.ldexp(values.unflatten(-1, (-1, BLOCK)), exponent[..., None]).flatten(-2)


class _StraightThrough(torch.autograd.Function):
    """Quantise and dequantise forward; the identity backward (RCEIL never saturates, so nothing is cut)."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, element: ElementFormat) -> Tensor:
        return dequantise(*quantise(x, element)).to(x.dtype)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class FakeQuantise(nn.Module):
    """Numbers as MXFP4 (E2M1) or MXFP8 (E4M3) would store them, blocks along the last axis."""

    def __init__(self, element: ElementFormat = E2M1) -> None:
        super().__init__()
        self.element = element

    def forward(self, x: Tensor) -> Tensor:
        """Exactly the dequantised values, in the type of `x` (both formats fit into bfloat16)."""
        return _StraightThrough.apply(x, self.element)


def weight_quantiser(kind: str) -> nn.Module:
    """What expert weights go through: MXFP4, or nothing."""
    if kind not in EXPERT_WEIGHTS:
        raise OptionError(f"expert_weights is {kind!r}; known are {', '.join(EXPERT_WEIGHTS)}.")
    return FakeQuantise(E2M1) if kind == "mxfp4" else nn.Identity()


def activation_quantiser(kind: str) -> nn.Module:
    """What the inputs of both expert products go through: MXFP8, or nothing."""
    if kind not in EXPERT_ACTIVATIONS:
        raise OptionError(f"expert_activations is {kind!r}; known are {', '.join(EXPERT_ACTIVATIONS)}.")
    return FakeQuantise(E4M3) if kind == "mxfp8" else nn.Identity()


def packed_bytes(weight: Tensor, *, original: tuple[Bytes, Bytes] | None) -> tuple[Bytes, Bytes]:
    """(packed, scale) of one expert matrix [R,K] as the last forward pass multiplied it.

    A matrix that still has the values of `original`, the bytes it was loaded from, keeps those bytes:
    encoding anew would give the same values under other scales where a block's largest code is 3 or less.
    """
    values = weight.detach().float().numpy()
    if original is not None and np.array_equal(mxfp4.decode(*original), values):
        return original
    return mxfp4.encode(values)
