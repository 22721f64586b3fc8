"""Seconds a token from a plan: the disk's time, the arithmetic's, and which of them decides.

seconds = reading + arithmetic. Reading goes at the rate that `doctor` saw in passes that stream (else at the
disk's own): what is hidden of it behind arithmetic is in that rate, and what is left of the arithmetic is
not hidden, since experts are known only when they are chosen and both want the same cores. The larger of two
overlapping times, tried before, was 20 to 40 % short of runs (docs/log.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from twoends.checkpoint.config import ModelConfig
from twoends.engine.budget import Plan
from twoends.engine.device import DiskRate
from twoends.sizing.calibration import ComputeRate


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """One decoded token; `demanded_s` is the experts' part of the reading.

    `arithmetic_s` is None where `doctor` has not measured it: seconds are reading then. `seconds` is
    None where the disk's rate is not known and something must be read.
    """

    read_bytes: float
    reading_s: float | None
    arithmetic_s: float | None
    demanded_s: float
    seconds: float | None

    @property
    def wall(self) -> str | None:
        """What decides: "disk" or "arithmetic"; None where it is not known."""
        if self.arithmetic_s is None or self.reading_s is None:
            return None
        return "disk" if self.reading_s >= self.arithmetic_s else "arithmetic"

    def as_object(self) -> dict[str, Any]:
        """For --json."""
        return {
            "read_bytes": self.read_bytes,
            "reading_s": self.reading_s,
            "arithmetic_s": self.arithmetic_s,
            "demanded_s": self.demanded_s,
            "seconds": self.seconds,
            "wall": self.wall,
        }


def estimate(
    plan: Plan,
    config: ModelConfig,
    *,
    disk: DiskRate | None,
    compute: ComputeRate | None,
    hit_share: float = 0.0,
    is_packed: bool = False,
) -> Estimate:
    """A decoding pass of one row. `hit_share` of its experts are already here; none, if nothing is known.

    The products of a packed trunk are another kernel, which `doctor` does not measure: no arithmetic then.
    """
    misses = 1.0 - hit_share
    experts = plan.expert_bytes_per_token * misses
    read = plan.streamed_bytes_per_pass + experts + plan.embedding_bytes_per_token
    rate = _reading_rate(disk, compute)
    reading = None if rate is None else read / rate
    arithmetic = None if is_packed else _arithmetic_s(plan, config, compute)
    demanded = 0.0 if rate is None else experts / rate
    return Estimate(
        read_bytes=read,
        reading_s=reading,
        arithmetic_s=arithmetic,
        demanded_s=demanded,
        seconds=None if reading is None else reading + (arithmetic or 0.0),
    )


def _reading_rate(disk: DiskRate | None, compute: ComputeRate | None) -> float | None:
    if disk is None:
        return None
    return disk.bytes_per_s if compute is None else min(disk.bytes_per_s, compute.reading_bytes_per_s)


def _arithmetic_s(plan: Plan, config: ModelConfig, compute: ComputeRate | None) -> float | None:
    """Products of trunk and chosen experts, and what every layer costs."""
    if compute is None:
        return None
    expert_rate = compute.mxfp4_bytes_per_s if config.family == "kimi-k3" else compute.bf16_bytes_per_s
    trunk_s = plan.trunk_bytes_per_pass / compute.bf16_bytes_per_s
    experts_s = plan.expert_bytes_per_token / expert_rate
    return trunk_s + experts_s + config.num_layers * compute.layer_s
