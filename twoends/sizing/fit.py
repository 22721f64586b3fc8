"""What fits: the form that weights take on an accelerator, how many of them hold a model, and whole nodes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from twoends.errors import OptionError
from twoends.sizing.footprint import RELEASED_VALUE_BYTES, ROUTED, Footprint
from twoends.sizing.machines import Accelerator

# Bits of one routed weight, a block's share of its scale included.
BITS = {"MXFP4": 4.25, "FP8": 8.0, "BF16": 16.0, "F32": 32.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightForm:
    """The routed experts in one format, all else as released; `reason` says why that one."""

    experts_as: str
    expert_bytes: float
    num_bytes: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """How many accelerators hold `needed_bytes`: by memory alone, and by whole nodes."""

    needed_bytes: float
    by_memory_exact: float
    by_memory: int
    nodes: int
    count: int
    left_bytes: float

    @property
    def left_share(self) -> float:
        """Of the memory of all of them."""
        return self.left_bytes / (self.left_bytes + self.needed_bytes)


def as_released(foot: Footprint) -> WeightForm:
    """The bytes of the files themselves."""
    form = foot.model.expert_format.upper()
    return WeightForm(
        experts_as=form, expert_bytes=foot.expert_bytes, num_bytes=foot.num_bytes, reason="as released"
    )


def form_on(foot: Footprint, accelerator: Accelerator, *, experts_as: str | None = None) -> WeightForm:
    """What an accelerator holds. Where it can't multiply the released format, experts take its narrowest.

    `experts_as` overrides that: packed weights may be kept and unpacked on their way to the cores.
    """
    released = as_released(foot)
    if experts_as is None:
        if released.experts_as in accelerator.formats:
            reason = f"{accelerator.generation} multiplies {released.experts_as}"
            return recoded(foot, released.experts_as, reason=reason)
        wider = [f for f in accelerator.formats if BITS[f] > BITS[released.experts_as]]
        narrowest = min(wider, key=lambda f: BITS[f])
        reason = f"{accelerator.generation} has no {released.experts_as}; {BITS[narrowest]:g} bits instead"
        return recoded(foot, narrowest, reason=reason)
    return recoded(foot, experts_as, reason="as asked")


def recoded(foot: Footprint, experts_as: str, *, reason: str) -> WeightForm:
    """The footprint with its routed experts in another format. Raises OptionError for one that is unknown."""
    if experts_as not in BITS:
        raise OptionError(f"there is no format {experts_as}.", remedies=[f"Formats: {', '.join(BITS)}"])
    released = as_released(foot)
    if experts_as == released.experts_as:
        expert_bytes = released.expert_bytes
    else:
        expert_bytes = foot.expert_parameters * BITS[experts_as] / 8
    rest = sum(part.num_bytes for part in foot.parts if part.name != ROUTED)
    return WeightForm(
        experts_as=experts_as,
        expert_bytes=expert_bytes,
        num_bytes=rest + foot.num_experts * expert_bytes,
        reason=reason,
    )


def fit(needed_bytes: float, *, memory_bytes: float, node: int) -> Fit:
    """The least number of accelerators, by memory and by node."""
    exact = needed_bytes / memory_bytes
    by_memory = math.ceil(exact)
    nodes = math.ceil(by_memory / node)
    return Fit(
        needed_bytes=needed_bytes,
        by_memory_exact=exact,
        by_memory=by_memory,
        nodes=nodes,
        count=nodes * node,
        left_bytes=nodes * node * memory_bytes - needed_bytes,
    )


def sequences_that_fit(foot: Footprint, left_bytes: float, *, context_tokens: int) -> int:
    """Sequences of that length whose state and latent cache the memory left over holds."""
    each = foot.sequence_bytes(context_tokens, value_bytes=RELEASED_VALUE_BYTES)
    return max(int(left_bytes // each), 0)
