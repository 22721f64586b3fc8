"""Replays a routing trace through every policy at several capacities: hits, and the share of Belady's."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from twoends.bench.replay_policies import belady_hits, lfu_hits, lru_hits, s3fifo_hits
from twoends.bench.traces import RoutingTrace
from twoends.engine.curve import HitCurve, with_ends
from twoends.engine.policies import Decayed, Key, Policy, make_policy
from twoends.engine.profile import ExpertProfile

# In token cycles.
CAPACITIES = (1 / 8, 1 / 4, 1 / 2, 3 / 4, 1.0, 1.5, 2.0, 4.0)
_OTHERS = {"lru": lru_hits, "lfu": lfu_hits, "s3fifo": s3fifo_hits, "belady": belady_hits}
POLICIES = ("lru", "lfu", "s3fifo", "ours", "belady")


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityRow:
    """Hits of every policy with this many slots."""

    cycles: float
    slots: int
    hits: dict[str, int]

    @property
    def share_of_belady(self) -> float | None:
        """Our hits over those of the policy that knows the future; None where it has none."""
        return self.hits["ours"] / self.hits["belady"] if self.hits["belady"] else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayReport:
    """A trace in figures, and one row per capacity. `ceiling_hits`: all but the first use of each expert."""

    form: str
    ranked: bool
    num_tokens: int
    num_layers: int
    cycle_slots: int
    num_requests: int
    ceiling_hits: int
    rows: tuple[CapacityRow, ...]

    def as_json(self) -> dict[str, object]:
        """The fields by name; hits are counts of `num_requests`."""
        rows = [dataclasses.asdict(row) | {"share_of_belady": row.share_of_belady} for row in self.rows]
        return dataclasses.asdict(self) | {"rows": rows}


def replay(
    trace: RoutingTrace,
    *,
    capacities: Sequence[float] = CAPACITIES,
    row_done: Callable[[CapacityRow], None] = lambda row: None,
) -> ReplayReport:
    """All policies at every capacity (in token cycles, smallest first)."""
    requests = trace.requests()
    rows = []
    for cycles in sorted(set(capacities)):
        slots = max(1, int(cycles * trace.cycle_slots))
        hits = {name: count(requests, slots) for name, count in _OTHERS.items()}
        hits["ours"] = engine_hits(trace, slots)
        rows.append(CapacityRow(cycles=cycles, slots=slots, hits={name: hits[name] for name in POLICIES}))
        row_done(rows[-1])
    return ReplayReport(
        form=trace.form,
        ranked=trace.ranked,
        num_tokens=trace.num_tokens,
        num_layers=len(trace.layers),
        cycle_slots=trace.cycle_slots,
        num_requests=len(requests),
        ceiling_hits=len(requests) - len(set(requests)),
        rows=tuple(rows),
    )


def engine_hits(trace: RoutingTrace, num_slots: int) -> int:
    """Hits of the engine's own policy object, asked as the engine asks it."""
    return _replay_engine(trace, num_slots, trace.layers, trace.num_experts).hits


def engine_passes(trace: RoutingTrace, num_slots: int) -> list[tuple[int, int]]:
    """(requests, hits) of every pass; a pass begins at the first of the layers."""
    return _replay_engine(trace, num_slots, trace.layers, trace.num_experts).passes


def measured_profile(
    trace: RoutingTrace, report: ReplayReport, *, fingerprint: str, layers: range, num_experts: int
) -> ExpertProfile:
    """What a trace of this model says: how popular experts were at its end, and what slots were worth."""
    points = [(row.slots, row.hits["ours"] / report.num_requests) for row in report.rows]
    policy = _replay_engine(trace, report.cycle_slots, layers, num_experts).policy
    assert isinstance(policy, Decayed)
    source = f"measured: replay of {report.num_tokens:,} tokens"
    curve = HitCurve(points=with_ends(points, len(layers) * num_experts), source=source)
    return ExpertProfile(fingerprint=fingerprint, popularity_LE=policy.popularity_LE, curve=curve)


def _replay_engine(trace: RoutingTrace, num_slots: int, layers: range, num_experts: int) -> _Slots:
    cache = _Slots(
        make_policy(
            "decayed",
            num_slots,
            first_layer=layers[0],
            num_layers=len(layers),
            num_experts=num_experts,
            choice=trace.steps[0].ids_TS.shape[1],
            ranked=trace.ranked,
        )
    )
    for step in trace.steps:
        if step.layer == trace.layers[0]:
            cache.passes.append((0, 0))
        keys = [(step.layer, expert) for expert in dict.fromkeys(step.ids_TS.ravel().tolist())]
        before = cache.hits
        cache.policy.observe(step.layer, step.ids_TS)
        cache.serve(keys)
        requests, hits = cache.passes[-1]
        cache.passes[-1] = (requests + len(keys), hits + cache.hits - before)
    return cache


class _Slots:
    """What engine/experts.py keeps around a policy, without the bytes."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.hits = 0
        # (requests, hits) of every pass that was replayed.
        self.passes: list[tuple[int, int]] = []
        self._where: dict[Key, int] = {}
        self._owner: dict[int, Key] = {}

    def serve(self, keys: list[Key]) -> None:
        """One layer's experts of one pass: what is here first, then the rest as slots come free."""
        here = [key for key in keys if key in self._where]
        self.hits += len(here)
        busy: dict[int, None] = {}
        for key in here:
            self.policy.touch(key, self._where[key])
            busy[self._where[key]] = None
        missing = deque(key for key in keys if key not in self._where)
        while missing:
            slot = self.policy.place(missing[0], busy.__contains__)
            if slot is None:
                # Every slot is in use: the one that was asked for first is used and free again.
                del busy[next(iter(busy))]
                continue
            self._move_in(missing.popleft(), slot)
            busy[slot] = None

    def _move_in(self, key: Key, slot: int) -> None:
        old = self._owner.get(slot)
        if old is not None:
            del self._where[old]
        self._owner[slot], self._where[key] = key, slot
