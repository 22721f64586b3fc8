"""How fast: bytes of one pass over every link, each link's time, and which of them is the wall.

If all links work side by side, a pass takes as long as the slowest: a bound on speed, not a promise.
"""

from __future__ import annotations

from dataclasses import dataclass

from twoends.sizing.fit import WeightForm, as_released, form_on
from twoends.sizing.footprint import OUR_VALUE_BYTES, RELEASED_VALUE_BYTES, Footprint
from twoends.sizing.links import ZEN4_CORE, CoreRate, Link, accelerator_links, host_links
from twoends.sizing.machines import Machine
from twoends.sizing.placement import Demand, Tier, demand_of, place
from twoends.sizing.routing import Rows


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
    tiers = place(foot, machine, demand, state_bytes=rows.sequences * each)
    links = host_links if on_host else accelerator_links
    return Speed(
        machine=machine,
        form=form,
        demand=demand,
        tiers=tiers,
        links=links(foot, machine, demand, tiers, core=core),
    )
