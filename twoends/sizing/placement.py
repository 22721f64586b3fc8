"""Where weights lie: as near as they fit, trunk and head first, then experts; what is left is on disk.

First in the accelerators' memory, then in the host's. State and latent cache come before any weight.
"""

from __future__ import annotations

from dataclasses import dataclass

from twoends.errors import DoesNotFit
from twoends.sizing.fit import WeightForm
from twoends.sizing.footprint import Footprint
from twoends.sizing.machines import Machine
from twoends.sizing.routing import RoutingCurve, Rows, curve_name, curve_of, distinct_experts
from twoends.units import format_bytes

# Measured: this program, what its tokenizer adds for each token; and the widest window of its plans.
PROGRAM_BYTES = 70_000_000
_TOKENIZER_BYTES_PER_TOKEN = 290
_WINDOW_BYTES = 100_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Bytes of one pass, wherever they lie."""

    rows: Rows
    trunk_bytes: float
    head_bytes: float
    distinct: float
    expert_bytes: float
    routed_bytes: float
    sequence_bytes: float
    curve: str

    @property
    def weight_bytes(self) -> float:
        """Trunk, head and the chosen experts."""
        return self.trunk_bytes + self.head_bytes + self.routed_bytes

    def per_token(self, num_bytes: float) -> float:
        """A pass's bytes shared by the tokens that it gives."""
        return num_bytes / self.rows.tokens_per_pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """One memory: what it holds of trunk and head, of experts, and the share of requests it answers."""

    name: str
    size_bytes: float
    reserved_bytes: float
    trunk_bytes: float
    expert_bytes: float
    hit_share: float


def demand_of(
    foot: Footprint, rows: Rows, *, form: WeightForm, context_tokens: int, value_bytes: int
) -> Demand:
    """The bytes that a pass needs. Raises OptionError for drafts beyond the measured curve."""
    config, curve = foot.model.config, curve_of(foot.model)
    distinct = distinct_experts(config, rows, curve)
    state = 2 * (foot.state_values + foot.tail_values)
    cache = len(config.mla_layers) * config.latent_row * context_tokens
    return Demand(
        rows=rows,
        trunk_bytes=foot.trunk_bytes,
        head_bytes=foot.head.num_bytes,
        distinct=distinct,
        expert_bytes=form.expert_bytes,
        routed_bytes=len(config.moe_layers) * distinct * form.expert_bytes,
        sequence_bytes=rows.sequences * value_bytes * (state + cache),
        curve=curve_name(curve, rows),
    )


def place(foot: Footprint, machine: Machine, demand: Demand, *, state_bytes: float) -> tuple[Tier, ...]:
    """What each memory holds; `state_bytes` are of all sequences. Raises DoesNotFit for no room."""
    sizes: list[tuple[str, float, float]] = []
    program = program_bytes(foot) + min(_WINDOW_BYTES, foot.trunk_bytes // 4)
    if machine.accelerator is not None:
        size = machine.count * machine.accelerator.memory_bytes.value
        sizes.append(("accelerators", size, state_bytes))
        if machine.ram_bytes is not None:
            sizes.append(("host memory", machine.ram_bytes.value, program))
    else:
        size = 0.0 if machine.ram_bytes is None else machine.ram_bytes.value
        sizes.append(("host memory", size, program + state_bytes))
    trunk_left, held = demand.trunk_bytes + demand.head_bytes, 0.0
    tiers: list[Tier] = []
    curve = curve_of(foot.model)
    for name, size, reserved in sizes:
        room = size - reserved
        if room < 0:
            raise DoesNotFit(
                f"state, cache and program take {format_bytes(reserved)}; "
                f"{machine.name} has {format_bytes(size)} for them.",
                evidence=[(name, format_bytes(size))],
                remedies=["Lower --context or --sequences, or name a larger machine."],
            )
        trunk = min(room, trunk_left)
        trunk_left -= trunk
        experts = min(room - trunk, foot.num_experts * demand.expert_bytes - held)
        held += experts
        tiers.append(
            Tier(
                name=name,
                size_bytes=size,
                reserved_bytes=reserved,
                trunk_bytes=trunk,
                expert_bytes=experts,
                hit_share=hit_share(foot, held, demand=demand, curve=curve),
            )
        )
    return tuple(tiers)


def program_bytes(foot: Footprint) -> int:
    """What this program takes of a host's memory before any weight."""
    return PROGRAM_BYTES + _TOKENIZER_BYTES_PER_TOKEN * foot.model.config.vocab_size


def hit_share(foot: Footprint, held_bytes: float, *, demand: Demand, curve: RoutingCurve | None) -> float:
    """Share of a pass's experts that are already in memory that holds so many bytes of them.

    The better of the engine's measured curve and of holding any fixed share of all experts.
    """
    every_byte = foot.num_experts * demand.expert_bytes
    if held_bytes > every_byte * (1 - 1e-9):
        return 1.0
    fixed = held_bytes / every_byte
    if curve is None:
        return fixed
    cycles = held_bytes / demand.routed_bytes
    return max(fixed, curve.hit_share(cycles, all_cycles=every_byte / demand.routed_bytes))


def missing_bytes(demand: Demand, tiers: tuple[Tier, ...]) -> float:
    """Bytes of a pass that none of these memories holds."""
    trunk = demand.trunk_bytes + demand.head_bytes - sum(tier.trunk_bytes for tier in tiers)
    return max(trunk, 0.0) + demand.routed_bytes * (1 - tiers[-1].hit_share)
