"""Seconds a token from a plan: the disk's time, the arithmetic's, and which of them decides.

The trunk is read ahead of its use, side by side with the arithmetic; experts are known only when they are
chosen, so their reading is waited for:  seconds = max(all reading, arithmetic + reading of experts).
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
    """One decoded token. `arithmetic_s` is None where `doctor` has not measured it: seconds are reading then.

    `seconds` is None where the disk's rate is not known and something must be read.
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
        return "disk" if self.reading_s >= self.arithmetic_s + self.demanded_s else "arithmetic"

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
    reading = None if disk is None else read / disk.bytes_per_s
    arithmetic = None if is_packed else _arithmetic_s(plan, config, compute)
    demanded = 0.0 if disk is None else experts / disk.bytes_per_s
    if compute is not None and misses:
        some_miss = 1.0 - hit_share**config.experts_per_token
        demanded += len(config.moe_layers) * compute.miss_s * some_miss
    times = [reading, None if arithmetic is None else arithmetic + demanded]
    known = [time for time in times if time is not None]
    return Estimate(
        read_bytes=read,
        reading_s=reading,
        arithmetic_s=arithmetic,
        demanded_s=demanded,
        seconds=max(known) if reading is not None else None,
    )


def _arithmetic_s(plan: Plan, config: ModelConfig, compute: ComputeRate | None) -> float | None:
    """Products of trunk and chosen experts, and what every layer costs."""
    if compute is None:
        return None
    expert_rate = compute.mxfp4_bytes_per_s if config.family == "kimi-k3" else compute.bf16_bytes_per_s
    trunk_s = plan.trunk_bytes_per_pass / compute.bf16_bytes_per_s
    experts_s = plan.expert_bytes_per_token / expert_rate
    return trunk_s + experts_s + config.num_layers * compute.layer_s
