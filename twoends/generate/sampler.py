"""Logits -> the next id. Greedy is the reference; a draw depends on nothing but logits, settings, position.

The exact order of operations is part of the contract (docs/contracts.md, Sampling): the same binary32
logits, Sampling and position give the same id on every machine and with every numpy.
"""

from __future__ import annotations

import hashlib
import math
import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from twoends.errors import NotSound, OptionError
from twoends.kernels.ops import F32
from twoends.kernels.reference.elementary import exp

# Beyond these a quotient of binary32 logits says nothing: all weight on one id, or the same for all.
MIN_TEMPERATURE = 1e-6
MAX_TEMPERATURE = 1e6
_SEED_END = 1 << 64
_DRAW = b"twoends.draw"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the next id is chosen. The defaults are greedy.

    temperature   0 is greedy; else from 1e-6 to 1e6, rounded to binary32
    top_p         above 0, at most 1: keep the likeliest ids that together reach this share; 1 keeps all
    top_k         keep this many of the likeliest ids; 0 keeps all
    seed          0 to 2^64 - 1; without effect when greedy

    Raises OptionError naming the value and its range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        _check_number("temperature", self.temperature)
        if self.temperature != 0 and not MIN_TEMPERATURE <= self.temperature <= MAX_TEMPERATURE:
            raise _out_of_range(
                "temperature", self.temperature, f"0 (greedy), or {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}"
            )
        _check_number("top_p", self.top_p)
        if not 0 < self.top_p <= 1:
            raise _out_of_range("top_p", self.top_p, "above 0, at most 1 (1 keeps every token)")
        _check_whole("top_k", self.top_k)
        if self.top_k < 0:
            raise _out_of_range("top_k", self.top_k, "0 (keeps every token) or more")
        _check_whole("seed", self.seed)
        if not 0 <= self.seed < _SEED_END:
            raise _out_of_range("seed", self.seed, f"0 to {_SEED_END - 1}")


def pick(logits_W: F32, sampling: Sampling, *, position: int) -> int:
    """The id that follows. `position` is its own absolute place in the sequence, the first id being 0.

    Greedy: the largest logit, the lowest id on ties. Otherwise:

    1. Order: ids by logit descending, lowest id first on ties (-0 equals +0).
    2. top_k: the first k of that order (all if k is 0 or more than there are).
    3. Weights, binary32: d = logit - largest logit, then d / f32(temperature), then exp (ours).
    4. Running totals in binary64, in that order: c[i] = c[i-1] + f64(weight[i]).
    5. top_p: the shortest prefix whose total reaches top_p * c[last] (one binary64 product).
    6. Draw: the first id whose running total exceeds uniform(seed, position) * c[end of the prefix].

    Batch, chunks, drafts and restored sessions can't change a draw, since only `position` keys it.
    Raises NotSound if a logit is not finite.
    """
    assert logits_W.ndim == 1
    assert logits_W.dtype == np.float32
    _check_finite(logits_W, position=position)
    if sampling.temperature == 0:
        return int(np.argmax(logits_W))
    ids = _by_logit(logits_W, top_k=sampling.top_k)
    with np.errstate(over="ignore", under="ignore"):
        scaled = (logits_W[ids] - logits_W[ids[0]]) / np.float32(sampling.temperature)
    # np.cumsum adds one element after the other, unlike np.sum
    totals = np.cumsum(exp(scaled), dtype=np.float64)
    last = int(np.searchsorted(totals, sampling.top_p * totals[-1], side="left"))
    drawn = uniform(seed=sampling.seed, position=position) * totals[last]
    return int(ids[np.searchsorted(totals, drawn, side="right")])


def uniform(*, seed: int, position: int) -> float:
    """A number in [0, 1), a multiple of 2^-53: the counter-based generator of all draws.

    The 8-byte BLAKE2b (RFC 7693) of the two numbers as little-endian 64-bit words, personalised
    "twoends.draw"; read as a little-endian word, its upper 53 bits are the fraction.
    """
    assert 0 <= position < _SEED_END
    digest = hashlib.blake2b(struct.pack("<QQ", seed, position), digest_size=8, person=_DRAW).digest()
    return float((int.from_bytes(digest, "little") >> 11) * 2.0**-53)


def _by_logit(logits_W: F32, *, top_k: int) -> npt.NDArray[np.int64]:
    """Ids by logit descending, lowest id first on ties; only the first `top_k` unless that is 0."""
    num_ids = len(logits_W)
    if not 0 < top_k < num_ids:
        return np.argsort(-logits_W, kind="stable")
    kth_largest = np.partition(logits_W, num_ids - top_k)[num_ids - top_k]
    # at least k ids, ascending; the stable sort keeps the lowest of those that tie for the last place
    candidates = np.flatnonzero(logits_W >= kth_largest)
    return candidates[np.argsort(-logits_W[candidates], kind="stable")[:top_k]]


def _check_finite(logits_W: F32, *, position: int) -> None:
    finite = np.isfinite(logits_W)
    if finite.all():
        return
    first = int(np.argmin(finite))
    raise NotSound(
        f"The logits for position {position:,} are not finite: {len(finite) - int(finite.sum()):,} of "
        f"{len(finite):,} are NaN or infinite.",
        evidence=[("first", f"token id {first:,}", f"logit {logits_W[first]}")],
        remedies=["A weight or a kernel is wrong; no token is given.", "Check this machine:  twoends doctor"],
    )


def _check_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise _out_of_range(name, value, "a finite number")


def _check_whole(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise _out_of_range(name, value, "a whole number")


def _out_of_range(name: str, value: object, allowed: str) -> OptionError:
    return OptionError(f"{name} is {value!r}; it must be {allowed}.")
