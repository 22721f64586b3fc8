"""Measures ComputeRate: passes of small synthetic models, in memory but for the last.

    small      a model of almost no bytes: what a layer costs whatever its size
    few, many  one model with layers like those of `mini`, choosing few or many of its experts
    streaming  `many` with nothing pinned and few slots, so that trunk and experts are read in every pass

The difference of few and many is the experts' bytes; what is left of `few` is the trunk's. Whole passes
are measured, not bare products, so that the program around the products counts as it does in a run.
"""

from __future__ import annotations

import dataclasses
import datetime
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from twoends.checkpoint.config import ModelConfig
from twoends.checkpoint.presets import preset_config
from twoends.checkpoint.tiny import write_synthetic
from twoends.engine.budget import Plan
from twoends.engine.device import shape_under
from twoends.engine.open import Checkpoint, OpenModel
from twoends.errors import DoesNotFit
from twoends.kernels.choose import Choice
from twoends.sizing.calibration import ComputeRate
from twoends.units import format_bytes

# Memory that the open models take together, and some to spare.
NEEDED_BYTES = 1_000_000_000
_RAM_BYTES = 2_000_000_000
# The preset whose layers the large model has.
_LARGE = "mini"
_LAYERS, _EXPERTS = 5, 16
_FEW, _MANY = 2, 12
_PROMPT = 48
_ROUNDS, _PASSES = 5, 6
_WINDOW_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class _Probe:
    """One open model, the times of its passes and the bytes that each read."""

    config: ModelConfig
    model: OpenModel
    times: list[float]
    read_bytes: list[int]

    @property
    def pass_s(self) -> float:
        """The first quartile: others on this machine make passes longer, never shorter."""
        return float(np.quantile(self.times, 0.25))


def measure_compute(
    directory: Path,
    choice: Choice,
    *,
    progress: Callable[[str], None] = lambda _: None,
) -> ComputeRate:
    """Writes temporary checkpoints into `directory` and runs them. Raises DoesNotFit, OSError."""
    progress("measuring the arithmetic")
    small = preset_config("nano")
    large = dataclasses.replace(preset_config(_LARGE, num_layers=_LAYERS), num_experts=_EXPERTS)
    with tempfile.TemporaryDirectory(dir=directory, prefix=".twoends-doctor-") as name:
        places = [Path(name) / "small", Path(name) / "large"]
        for place, config in zip(places, (small, large), strict=True):
            place.mkdir()
            write_synthetic(place, config)
        probes: list[_Probe] = []
        try:
            probes.append(_open(places[0], None, choice))
            for chosen, streams in ((_FEW, False), (_MANY, False), (_MANY, True)):
                probes.append(_open(places[1], chosen, choice, streams=streams))
            for _ in range(_ROUNDS):
                for probe in probes:
                    _run(probe, may_read=probe is probes[-1])
            return _solve(*probes, choice=choice)
        finally:
            for probe in probes:
                probe.model.close()


def _open(directory: Path, chosen: int | None, choice: Choice, *, streams: bool = False) -> _Probe:
    found = Checkpoint.open(directory)
    config = found.config
    if chosen is not None:
        config = dataclasses.replace(config, experts_per_token=chosen)
    checkpoint = Checkpoint(directory=directory, config=config, index=found.index)

    def plan_of(ram_bytes: int) -> Plan:
        return checkpoint.plan(
            ram_bytes=ram_bytes,
            context_tokens=_PROMPT * (2 + _ROUNDS * _PASSES),
            chunk_tokens=_PROMPT,
            reference=choice.ops.backend == "reference",
        )

    plan = plan_of(_RAM_BYTES)
    if streams:
        # The window of a larger model, and room for one choice: the same plan with nothing that stays.
        plan = dataclasses.replace(
            plan,
            window_bytes=_WINDOW_BYTES,
            panel_bytes=_WINDOW_BYTES // 8,
            pin_budget_bytes=0,
            pinned_bytes=0,
            num_slots=2 * config.experts_per_token,
        )
    elif plan.streamed_bytes_per_pass:
        raise DoesNotFit(
            f"measuring the arithmetic needs {format_bytes(plan.trunk_bytes_per_pass)} in memory."
        )
    model = OpenModel(checkpoint, plan, choice.ops, read_shape=shape_under(directory))
    return _Probe(config=config, model=model, times=[], read_bytes=[])


def _run(probe: _Probe, *, may_read: bool) -> None:
    """Several passes of one token each; those that read an expert count only where they may."""
    model, counters = probe.model, probe.model.counters
    ids = np.random.default_rng(len(probe.times)).integers(0, probe.config.vocab_size, _PROMPT).tolist()
    if not probe.times:
        # Every expert is chosen by some token of a prompt; what was never chosen is read later.
        model.expect_passes(2)
        model.run_pass(ids, layer_done=_nothing)
        model.run_pass(ids[:1], layer_done=_nothing)
    if may_read:
        # As in a run, the end of one pass is read ahead into the next; what is begun last is not waited for.
        model.expect_passes(_PASSES)
    kept = 0
    for token in ids[: _PASSES * 4]:
        before = counters.bytes_experts + counters.bytes_trunk
        began = time.perf_counter()
        model.run_pass([token], layer_done=_nothing)
        seconds = time.perf_counter() - began
        read = counters.bytes_experts + counters.bytes_trunk - before
        if may_read or not read:
            probe.times.append(seconds)
            probe.read_bytes.append(read)
            kept += 1
        if kept == _PASSES:
            return
    assert probe.times, "after the prompt some pass finds all its experts"


def _nothing(num_layers: int) -> None:
    """Called after each layer."""


def _solve(small: _Probe, few: _Probe, many: _Probe, streaming: _Probe, *, choice: Choice) -> ComputeRate:
    """Four kinds of passes, four unknowns; what noise would make negative is kept above zero."""
    layer_s = small.pass_s / small.config.num_layers
    plan, layers = many.model.plan, len(many.config.moe_layers)
    expert_bytes = plan.expert_bytes_per_request
    more_s = max(many.pass_s - few.pass_s, 1e-9)
    expert_rate = layers * (_MANY - _FEW) * expert_bytes / more_s
    experts_s = layers * _FEW * expert_bytes / expert_rate
    trunk_s = max(few.pass_s - experts_s - few.config.num_layers * layer_s, 0.1 * few.pass_s)
    return ComputeRate(
        isa=choice.isa or "reference",
        threads=choice.threads,
        bf16_bytes_per_s=few.model.plan.trunk_bytes_per_pass / trunk_s,
        mxfp4_bytes_per_s=expert_rate,
        layer_s=layer_s,
        reading_bytes_per_s=statistics.median(streaming.read_bytes) / statistics.median(streaming.times),
        date=datetime.date.today().isoformat(),
    )
