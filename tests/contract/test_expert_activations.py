"""Experts whose inputs are rounded to MXFP8: one answer everywhere, and another one than without."""

from __future__ import annotations

import pytest

from tests.support.backends import native_isas
from tests.support.running import make_ops, run
from twoends.engine.open import Checkpoint
from twoends.errors import OptionError


@pytest.fixture(scope="module")
def rounded(nano_dirs):
    return Checkpoint.open(nano_dirs["kimi-k3"], expert_activations="mxfp8")


@pytest.fixture(scope="module")
def definition(rounded):
    return run(rounded, ops=make_ops("reference"), num_new=4, budget="ample")


@pytest.mark.parametrize("isa", native_isas())
@pytest.mark.parametrize(("budget", "chunk", "threads"), [("ample", None, 1), ("floor", 3, 2)])
def test_rounded_inputs_give_the_definitions_logits(rounded, definition, isa, budget, chunk, threads):
    found = run(rounded, ops=make_ops(isa, threads), num_new=4, budget=budget, chunk=chunk)
    assert found.digests == definition.digests
    assert found.ids == definition.ids


def test_rounding_is_not_inert(nano_checkpoints, rounded, definition):
    plain = run(nano_checkpoints["kimi-k3"], ops=make_ops(native_isas()[0]), num_new=4, budget="ample")
    assert plain.digests != definition.digests
    assert rounded.index.fingerprint != nano_checkpoints["kimi-k3"].index.fingerprint


def test_experts_that_are_not_mxfp4_are_refused(nano_dirs):
    with pytest.raises(OptionError, match="go with MXFP4 experts"):
        Checkpoint.open(nano_dirs["kimi-linear"], expert_activations="mxfp8")
