"""MXFP4 fake quantisation: the forward pass sees the released nibbles, the gradient goes straight through.

Blocks of 32 weights along the input share a power of two 2^e with e = ceil(log2(amax / 6)) (RCEIL, the rule
the released bytes show), so nothing saturates. Elements lie on {0, .5, 1, 1.5, 2, 3, 4, 6} with a sign bit
that is copied, minus zero included. Ties go to the even code.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

BLOCK = 32
_EXPONENT_MIN, _EXPONENT_MAX = -127, 127
# Half a unit of binary32 at 1.5 * 2^22 is .25, so adding and subtracting it rounds to multiples of .5.
_ROUND_TO_HALF = 1.5 * 2.0**22
_FLOAT_EXPONENT_BITS = 0x7F800000


def block_exponents(weight: Tensor) -> Tensor:
    """Exponents e of the block scales 2^e. `weight` [..., K] -> int32 [..., K / 32].

    The smallest e with amax <= 6 * 2^e, found without a logarithm: amax = m * 2^x with m in [.5, 1) and
    6 = .75 * 2^3. A block of zeros gets the smallest exponent.
    """
    if weight.shape[-1] % BLOCK:
        raise ValueError(
            f"MXFP4 blocks are {BLOCK} wide; the last axis of {tuple(weight.shape)} isn't a multiple"
        )
    amax = weight.detach().float().unflatten(-1, (-1, BLOCK)).abs().amax(-1)
    mantissa, exponent = torch.frexp(amax)
    exponent = exponent - 3 + (mantissa > 0.75).to(exponent.dtype)
    exponent = torch.where(amax == 0, torch.full_like(exponent, _EXPONENT_MIN), exponent)
    return exponent.clamp(_EXPONENT_MIN, _EXPONENT_MAX)


def round_to_e2m1(scaled: Tensor) -> Tensor:
    """Nearest E2M1 value of each binary32 element with |x| <= 6, ties to the even code, sign kept."""
    magnitude_bits = scaled.view(torch.int32) & _FLOAT_EXPONENT_BITS
    power = magnitude_bits.view(torch.float32).clamp_(min=1.0, max=4.0)
    magic = power.mul_(_ROUND_TO_HALF)
    rounded = (scaled.abs() + magic).sub_(magic)
    return torch.copysign(rounded, scaled)


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """E2M1 values (binary32) and int32 block exponents of `weight` [..., K]."""
    exponent = block_exponents(weight)
    blocks = weight.detach().float().unflatten(-1, (-1, BLOCK))
    # Two steps, because 2^127 is a number and 2^-(-127) times a tiny weight must not pass through inf.
    scaled = torch.ldexp(blocks, -exponent[..., None])
    return round_to_e2m1(scaled.contiguous()).flatten(-2), exponent


def dequantise(values: Tensor, exponent: Tensor) -> Tensor:
    """Weights of `quantise`'s pair, exact in binary32: values [..., K] times 2^exponent [..., K / 32]."""
    return torch.ldexp(values.unflatten(-1, (-1, BLOCK)), exponent[..., None]).flatten(-2)


class FakeQuantise(nn.Module):
    """A weight as MXFP4 would store it; the gradient passes unchanged (RCEIL never saturates)."""

    def forward(self, weight: Tensor) -> Tensor:
        """Exactly the dequantised value: `weight - weight` adds only a zero and the way for the gradient."""
        values, exponent = quantise(weight)
        return dequantise(values, exponent).to(weight.dtype) + (weight - weight.detach())
