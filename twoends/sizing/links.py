"""Links: disk, host memory, PCIe, HBM, NVLink, cores; the bytes of one pass over each, and their time."""

from __future__ import annotations

from dataclasses import dataclass

from twoends.errors import DoesNotFit
from twoends.sizing.evidence import Figure, arithmetic, measured
from twoends.sizing.footprint import RELEASED_VALUE_BYTES, Footprint
from twoends.sizing.machines import Machine
from twoends.sizing.placement import Demand, Tier, missing_bytes
from twoends.units import format_bytes

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
class Link:
    """Bytes of one pass over one link (per accelerator where there are several), and their time."""

    name: str
    num_bytes: float
    rate: Figure
    seconds: float
    how: str


def host_links(
    foot: Footprint, machine: Machine, demand: Demand, tiers: tuple[Tier, ...], *, core: CoreRate
) -> tuple[Link, ...]:
    """Disk, memory and cores of a machine whose cores do the arithmetic."""
    from_disk = missing_bytes(demand, tiers)
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


def accelerator_links(
    foot: Footprint, machine: Machine, demand: Demand, tiers: tuple[Tier, ...], *, core: CoreRate
) -> tuple[Link, ...]:
    """The same with accelerators: shares of each, all at work at once."""
    card, count = machine.accelerator, machine.count
    assert card is not None, "there are accelerators"
    config, rows = foot.model.config, demand.rows.rows
    outside = missing_bytes(demand, tiers[:1])
    from_disk = missing_bytes(demand, tiers)
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
