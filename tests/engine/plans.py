"""Plans of models that mostly exist as configs only."""

from __future__ import annotations

from twoends.engine.budget import Plan, make_plan


def plan(model, ram_bytes, *, program=40_000_000, context=100, chunk=None, sequences=1) -> Plan:
    """The plan of a (config, index) pair."""
    config, index = model
    return make_plan(
        config,
        index,
        ram_bytes=ram_bytes,
        program_bytes=program,
        context_tokens=context,
        chunk_tokens=chunk,
        num_sequences=sequences,
    )


def floor_of(model, **options) -> int:
    """The fewest bytes that the pair can be planned for."""
    return plan(model, 10**13, **options).floor_bytes
