"""What a run reads and holds is what its plan said."""

from __future__ import annotations

import dataclasses
import math
import tracemalloc

import pytest

from tests.support.backends import native_isas
from tests.support.opened import generate, opened
from tests.support.running import PROMPT, make_ops
from tests.support.together import open_shared
from twoends.checkpoint.presets import preset_config
from twoends.checkpoint.tiny import write_synthetic
from twoends.engine.arena import PAGE
from twoends.engine.budget import scratch_bytes
from twoends.engine.open import Checkpoint
from twoends.generate.generator import Generator

FAMILIES = ("kimi-k3", "kimi-linear")
ISA = (native_isas() or ["reference"])[0]


@pytest.fixture(scope="module")
def small_checkpoint(tmp_path_factory):
    """Experts of 25 pages and matrices of 500: alignment is under a hundredth of every read."""
    nano = preset_config("nano")
    config = dataclasses.replace(
        nano,
        num_layers=5,
        hidden_size=512,
        vocab_size=1024,
        dense_width=1024,
        num_experts=16,
        expert_width=256,
        latent_width=256,
        mla_layers=(3, 4),
        bos_id=768,
        eos_id=770,
        pad_id=1023,
    )
    directory = tmp_path_factory.mktemp("small") / "model"
    write_synthetic(directory, config, seed=2)
    return Checkpoint.open(directory)


@pytest.mark.parametrize("budget", ["floor", 0.3, 1.0])
def test_a_run_counts_the_bytes_that_its_plan_promised(small_checkpoint, budget):
    """Decode passes at budgets that hold no expert for long: within 1 %, the trunk to the byte."""
    with opened(small_checkpoint, budget=budget, chunk=12, policy="lru") as model:
        generator = Generator(model, list(PROMPT), chunk=12)
        generate(generator, 1)
        counters = dataclasses.replace(model.counters)
        generate(generator, 6)
        found = model.counters
        planned = model.plan
    trunk = found.bytes_trunk - counters.bytes_trunk
    assert trunk == 6 * planned.streamed_bytes_per_pass > 0
    misses = (found.expert_requests - found.expert_hits) - (counters.expert_requests - counters.expert_hits)
    experts = found.bytes_experts - counters.bytes_experts
    assert experts == pytest.approx(misses * planned.expert_bytes_per_request, rel=0.01)
    assert found.expert_requests - counters.expert_requests == 6 * planned.experts_per_pass
    embedding = found.bytes_embedding - counters.bytes_embedding
    # The plan counts a row that crosses a page border; most don't.
    assert 0 < embedding <= 6 * planned.embedding_bytes_per_token
    if misses == 6 * planned.experts_per_pass:
        total = trunk + experts + embedding
        assert total == pytest.approx(6 * planned.bytes_per_token, rel=0.01)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("budget", ["floor", 0.2, 0.5, "ample"])
def test_what_the_engine_holds_is_what_the_plan_says(nano_checkpoints, family, budget):
    with opened(nano_checkpoints[family], budget=budget) as model:
        planned = {row.name: row.num_bytes for row in model.plan.rows}
        held = model.held_bytes
    books = model.plan.num_slots * 2048
    rows = sum(
        size for name, size in planned.items() if name not in ("program", "activations", "embedding rows")
    )
    assert sum(planned.values()) == model.plan.total_bytes, "no two rows have one name"
    assert held <= rows
    # Rows are rounded up to pages; pinned ones include small tensors in binary32, slots their books.
    assert rows - held <= books + len(planned) * PAGE + _decoded_bytes(model)


def _decoded_bytes(model):
    index = model.checkpoint.index
    layers = [None, *range(model.config.num_layers)]
    refs = [ref for layer in layers for ref in index.tensors(layer).values()]
    return sum(4 * math.prod(ref.shape) for ref in refs if min(ref.shape) < 8 or len(ref.shape) == 1)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunk", [1, 16, 256])
def test_the_activations_of_a_pass_stay_within_their_row(nano_checkpoints, family, chunk):
    """numpy tells tracemalloc of every array; Python's own small objects get 64 KB."""
    checkpoint = nano_checkpoints[family]
    with opened(checkpoint, context=2 * chunk, chunk=chunk) as model:
        model.run_pass([1] * chunk, layer_done=lambda done: None)
        tracemalloc.start()
        try:
            model.run_pass([i % 700 for i in range(chunk)], layer_done=lambda done: None)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert peak <= scratch_bytes(checkpoint.config, chunk) + 64 * 1024


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("sequences", "chunk"), [(2, 2), (8, 8), (8, 64), (3, 200)])
def test_the_activations_of_a_shared_pass_stay_within_their_rows(nano_checkpoints, family, sequences, chunk):
    """One sequence has most rows, then all have one; states, logits and sampling are counted elsewhere."""
    checkpoint = nano_checkpoints[family]
    model = open_shared(
        checkpoint, ops=make_ops(ISA), sequences=sequences, context=2 * chunk + 2, chunk=chunk
    )
    ones = [(place, [place + 1]) for place in range(1, sequences)]
    try:
        model.run_shared([(0, [1] * (chunk - sequences + 1)), *ones], layer_done=lambda done: None)
        tracemalloc.start()
        try:
            again = [i % 700 for i in range(chunk - sequences + 1)]
            model.run_shared([(0, again), *ones], layer_done=lambda done: None)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    finally:
        model.close()
    logits = next(row.num_bytes for row in model.plan.rows if row.name == "logits")
    assert peak <= scratch_bytes(checkpoint.config, chunk) + logits + 64 * 1024
