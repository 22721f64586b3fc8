"""What a routing trace tells of a router: how even its load is, and whether a cache can live from it.

A token chooses S of E experts in a layer. If tokens chose evenly and independently, the next token would
choose S / E of the same ones again; if they chose independently but by the loads that were measured, the sum
of squared shares says how many. What is above that is memory of the text: it is what balance can't take away.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from twoends.bench.replay import replay
from twoends.bench.traces import RoutingTrace
from twoends.kernels.ops import I32

# In token cycles.
CAPACITIES = (0.5, 1.0, 2.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterReport:
    """Means over the layers. Reuse is the share of a token's experts that the token before it chose too.

    `hits` has, for each capacity in token cycles, the share of requests that each policy finds.
    """

    num_tokens: int
    num_layers: int
    num_experts: int
    max_violation: float
    unused_experts: float
    reuse: float
    reuse_if_independent: float
    reuse_if_even: float
    hits: dict[float, dict[str, float]]

    def as_json(self) -> dict[str, object]:
        """The fields by name."""
        return dataclasses.asdict(self)


def router_report(
    trace: RoutingTrace, *, num_experts: int | None = None, capacities: Sequence[float] = CAPACITIES
) -> RouterReport:
    """The report of one trace; `num_experts` where the largest id in it may not be the last expert."""
    experts = num_experts or trace.num_experts
    layers = [_ids_of(trace, layer) for layer in trace.layers]
    shares = [np.bincount(ids.ravel(), minlength=experts) / len(ids) for ids in layers]
    chosen = layers[0].shape[1]
    replayed = replay(trace, capacities=capacities)
    return RouterReport(
        num_tokens=trace.num_tokens,
        num_layers=len(layers),
        num_experts=experts,
        max_violation=float(np.mean([share.max() / share.mean() - 1 for share in shares])),
        unused_experts=float(np.mean([(share == 0).mean() for share in shares])),
        reuse=float(np.mean([_reuse(ids) for ids in layers])),
        reuse_if_independent=float(np.mean([(share**2).sum() / chosen for share in shares])),
        reuse_if_even=chosen / experts,
        hits={
            row.cycles: {name: count / replayed.num_requests for name, count in row.hits.items()}
            for row in replayed.rows
        },
    )


def _ids_of(trace: RoutingTrace, layer: int) -> I32:
    """All choices of a layer in the order of tokens, [T, S]."""
    return np.concatenate([step.ids_TS for step in trace.steps if step.layer == layer])


def _reuse(ids_TS: I32) -> float:
    same = (ids_TS[1:, :, None] == ids_TS[:-1, None, :]).any(2)
    return float(same.mean()) if len(same) else 0.0
