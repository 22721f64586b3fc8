"""Several requests through one scheduler, with every choice that must not matter as an argument."""

from __future__ import annotations

from dataclasses import dataclass

from tests.support.running import plan_of, tokenizer_of
from twoends.engine.open import OpenModel
from twoends.engine.trace import Counters, Trace
from twoends.generate.generator import Outcome
from twoends.generate.sampler import Sampling
from twoends.generate.schedule import Request, Scheduler
from twoends.generate.stream import TextStream


@dataclass(slots=True, kw_only=True)
class Together:
    """Outcomes by key, the keys in the order of their ends, and what the passes carried."""

    outcomes: dict[int, Outcome]
    ends: list[int]
    num_passes: int
    num_rows: int
    counters: Counters


def request(
    checkpoint, key, prompt, num_new, *, sampling=None, stop_strings=(), stop_ids=frozenset()
) -> Request:
    return Request(
        key=key,
        ids=list(prompt),
        num_new=num_new,
        sampling=sampling or Sampling(),
        stream=TextStream(tokenizer_of(checkpoint), stop_strings=stop_strings, stop_ids=stop_ids),
    )


def open_shared(
    checkpoint, *, ops, sequences, budget="ample", chunk=None, context=64, policy="decayed", trace=None
):
    """An open model with poisoned buffers and room for so many sequences."""
    plan = plan_of(checkpoint, budget=budget, chunk=chunk, context=context, sequences=sequences)
    return OpenModel(checkpoint, plan, ops, policy=policy, poison=True, trace=Trace(trace) if trace else None)


def run_together(checkpoint, requests, *, ops, sequences, **options) -> Together:
    """All requests, submitted at once in their order."""
    model = open_shared(checkpoint, ops=ops, sequences=sequences, **options)
    outcomes: dict[int, Outcome] = {}
    try:
        scheduler = Scheduler(model)
        for one in requests:
            scheduler.submit(one)
        while not scheduler.is_idle:
            for chosen in scheduler.step(lambda done: None):
                if chosen.outcome is not None:
                    outcomes[chosen.request.key] = chosen.outcome
    finally:
        model.close()
    return Together(
        outcomes=outcomes,
        ends=list(outcomes),
        num_passes=scheduler.num_passes,
        num_rows=scheduler.num_rows,
        counters=model.counters,
    )
