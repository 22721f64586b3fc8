"""How fast: bytes of one pass over every link, each link's time, and which of them is the wall.

A pass carries rows. Weights lie as near as they fit: trunk and head first, then experts, first in the
accelerators' memory, then in the host's, the rest on disk. Each link is given its bytes; if all of them work
side by side, a pass takes as long as the slowest: a bound from above on speed, not a promise.
"""

from __future__ import annotations

from dataclasses import dataclass

from twoends.errors import DoesNotFit
from twoends.sizing.evidence import Figure, arithmetic, measured
from twoends.sizing.fit import BITS, WeightForm, as_released, form_on
from twoends.sizing.footprint import OUR_VALUE_BYTES, RELEASED_VALUE_BYTES, Footprint
from twoends.sizing.machines import Machine
from twoends.sizing.routing import RoutingCurve, Rows, curve_name, curve_of, distinct_experts
from twoends.units import format_bytes

# Measured: this program, what its tokenizer adds for each token; and the widest window of its plans.
PROGRAM_BYTES = 70_000_000
_TOKENIZER_BYTES_PER_TOKEN = 290
_WINDOW_BYTES = 100_000_000
_KERNELS = "twoends bench kernels --threads 1, one Zen 4 core with AVX-512, 2026-11-30 (docs/numbers.md)"


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreRate:
    """One core's products: bytes from memory per second for one row, operations per second for many."""

    bf16_rate: Figure
    mxfp4_rate: Figure
    bf16_flops: Figure
    mxfp4_flops: Figure


ZEN4_CORE = CoreRate(
    bf16_rate=measured(21.82e9, "bytes/s", _KERNELS),
    mxfp4_rate=measured(12.57e9, "bytes/s", _KERNELS),
    bf16_flops=measured(95e9, "FLOP/s", _KERNELS),
    mxfp4_flops=measured(69e9, "FLOP/s", _KERNELS),
)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Bytes of one pass over one link (per accelerator where there are several), and their time."""

    name: str
    num_bytes: float
    rate: Figure
    seconds: float
    how: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """One machine at one load. `pass_s` is the slowest link's time; `serial_s` the sum of all."""

    machine: Machine
    form: WeightForm
    demand: Demand
    tiers: tuple[Tier, ...]
    links: tuple[Link, ...]

    @property
    def wall(self) -> Link:
        """The link that decides."""
        return max(self.links, key=lambda link: link.seconds)

    @property
    def pass_s(self) -> float:
        """With every link at work side by side."""
        return self.wall.seconds

    @property
    def serial_s(self) -> float:
        """With one link at a time."""
        return sum(link.seconds for link in self.links)

    @property
    def tokens_per_s(self) -> float:
        """At best, all sequences together."""
        return self.demand.rows.tokens_per_pass / self.pass_s

    @property
    def regime(self) -> str:
        """Where the weights are: the word for the whole."""
        held = sum(tier.trunk_bytes for tier in self.tiers)
        whole = self.demand.trunk_bytes + self.demand.head_bytes
        if all(tier.trunk_bytes < 1 for tier in self.tiers):
            return "streamed"
        if held < whole - 1:
            return "partly pinned"
        if self.tiers[-1].hit_share < 1:
            return "trunk resident"
        first = self.tiers[0]
        everything = first.trunk_bytes >= whole - 1 and first.hit_share >= 1
        return "resident" if everything or len(self.tiers) == 1 else "resident in both memories"


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


def speed(
    foot: Footprint,
    machine: Machine,
    rows: Rows,
    *,
    context_tokens: int,
    core: CoreRate = ZEN4_CORE,
    experts_as: str | None = None,
) -> Speed:
    """Placement, links and times. Raises DoesNotFit where not even state and cache have room."""
    accelerator = machine.accelerator
    on_host = accelerator is None
    form = as_released(foot) if accelerator is None else form_on(foot, accelerator, experts_as=experts_as)
    value_bytes = OUR_VALUE_BYTES if on_host else RELEASED_VALUE_BYTES
    demand = demand_of(foot, rows, form=form, context_tokens=context_tokens, value_bytes=value_bytes)
    each = foot.sequence_bytes(context_tokens, value_bytes=value_bytes)
    tiers = _tiers(foot, machine, demand, state_bytes=rows.sequences * each)
    links = _host_links if on_host else _accelerator_links
    return Speed(
        machine=machine,
        form=form,
        demand=demand,
        tiers=tiers,
        links=links(foot, machine, demand, tiers, core=core),
    )


def _tiers(foot: Footprint, machine: Machine, demand: Demand, *, state_bytes: float) -> tuple[Tier, ...]:
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


def _host_links(
    foot: Footprint, machine: Machine, demand: Demand, tiers: tuple[Tier, ...], *, core: CoreRate
) -> tuple[Link, ...]:
    """Disk, memory and cores of a machine whose cores do the arithmetic."""
    from_disk = _missing(demand, tiers)
    links = _disk_link(machine, from_disk)
    if machine.memory_rate is not None:
        moved = demand.weight_bytes + demand.sequence_bytes + from_disk
        how = "weights and state to the cores, and what arrives from disk"
        links.append(_link("host memory", moved, machine.memory_rate, how))
    if machine.cores is not None:
        links.append(_cores_link(foot, machine.cores, demand, core))
    return tuple(links)


def _cores_link(foot: Footprint, cores: int, demand: Demand, core: CoreRate) -> Link:
    """Products at one row's rate, or at the arithmetic's where many rows share a weight."""
    packed = foot.model.expert_format == "mxfp4"
    experts = (core.mxfp4_rate, core.mxfp4_flops) if packed else (core.bf16_rate, core.bf16_flops)
    rows = demand.rows.rows
    trunk = demand.trunk_bytes + demand.head_bytes
    trunk_s = max(trunk / core.bf16_rate.value, rows * trunk / core.bf16_flops.value)
    flops = 2 * rows * foot.experts_per_token * foot.expert_parameters
    experts_s = max(demand.routed_bytes / experts[0].value, flops / experts[1].value)
    seconds = (trunk_s + experts_s) / cores
    num_bytes = demand.weight_bytes
    rate = Figure(
        value=num_bytes / seconds if seconds else 1.0,
        unit="bytes/s",
        kind="arithmetic",
        source=f"{cores} cores, each as measured: {core.bf16_rate.source}",
    )
    return Link(name="cores", num_bytes=num_bytes, rate=rate, seconds=seconds, how="products of all weights")


def _accelerator_links(
    foot: Footprint, machine: Machine, demand: Demand, tiers: tuple[Tier, ...], *, core: CoreRate
) -> tuple[Link, ...]:
    """The same with accelerators: shares of each, all at work at once."""
    card, count = machine.accelerator, machine.count
    assert card is not None, "there are accelerators"
    config, rows = foot.model.config, demand.rows.rows
    outside = _missing(demand, tiers[:1])
    from_disk = _missing(demand, tiers)
    links = _disk_link(machine, from_disk)
    if machine.memory_rate is not None and outside:
        links.append(_link("host memory", outside + from_disk, machine.memory_rate, "weights not in HBM"))
    if outside:
        links.append(
            _link("PCIe", outside / count, card.pcie_rate, "weights not in HBM, an equal share each")
        )
    moved = (demand.weight_bytes + demand.sequence_bytes) / count
    links.append(_link("HBM", moved, card.memory_rate, "weights, state and cache, an equal share each"))
    ring = min(count, card.node)
    if ring > 1:
        reduced = 2 * config.num_layers * rows * config.hidden_size * RELEASED_VALUE_BYTES
        how = "two sums over the node in each layer, ring of 2 (N - 1) / N"
        links.append(_link("NVLink", reduced * 2 * (ring - 1) / ring, card.link_rate, how))
    flops = 2 * foot.active_parameters * rows
    seconds = flops / (card.flops.value * count)
    links.append(
        Link(
            name="tensor cores",
            num_bytes=demand.weight_bytes / count,
            rate=arithmetic(demand.weight_bytes / count / seconds, "bytes/s", card.flops.source),
            seconds=seconds,
            how="2 operations a weight and row at the dense BF16 peak",
        )
    )
    return tuple(links)


def _missing(demand: Demand, tiers: tuple[Tier, ...]) -> float:
    """Bytes of a pass that none of these memories holds."""
    trunk = demand.trunk_bytes + demand.head_bytes - sum(tier.trunk_bytes for tier in tiers)
    return max(trunk, 0.0) + demand.routed_bytes * (1 - tiers[-1].hit_share)


def _disk_link(machine: Machine, num_bytes: float) -> list[Link]:
    """Nothing where nothing is read. Raises DoesNotFit where there is no disk to read it from."""
    if num_bytes < 1:
        return []
    if machine.disk_rate is None:
        raise DoesNotFit(
            f"{format_bytes(num_bytes)} of every pass must come from a disk whose rate is not known.",
            evidence=[("machine", machine.name)],
            remedies=["Say it:  --disk 6GB/s", "Or measure this machine's:  twoends doctor"],
        )
    return [_link("disk", num_bytes, machine.disk_rate, "weights that no memory holds")]


def _link(name: str, num_bytes: float, rate: Figure, how: str) -> Link:
    return Link(name=name, num_bytes=num_bytes, rate=rate, seconds=num_bytes / rate.value, how=how)


def bits_of(form: WeightForm) -> float:
    """Bits of one routed weight."""
    return BITS[form.experts_as]
