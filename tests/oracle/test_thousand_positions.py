"""Engine and trainer on a thousand positions of documents that no model was trained on, both in binary32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the training half needs torch (pip install 'twoends[train]')")
pytest.importorskip("safetensors", reason="the training half needs it (pip install 'twoends[train]')")

import twoends  # noqa: E402
from tests.oracle.told_roundings import Listener, tell  # noqa: E402
from tests.support.backends import native_isas  # noqa: E402
from tests.support.running import make_ops, plan_of  # noqa: E402
from twoends.engine.open import Checkpoint, OpenModel  # noqa: E402
from twoends.generate.tokenizer import Tokenizer  # noqa: E402
from twoends.train.export import load_checkpoint  # noqa: E402
from twoends.train.stories import document, load_story_book  # noqa: E402

SHIPPED = Path(twoends.__file__).parent / "assets" / "nano"
NUM_POSITIONS = 1000
LONGEST = 256
# The corpus draws its documents with small seeds.
SEED = 1_000_003

# As the issue of this model asks. Found: 1.7e-5 with inputs as they are, 1.6e-5 with rounded ones.
BOUND = 1e-4
# Of the root mean square of a row: how far from a border an input may lie that the two round apart. Found:
# all ten of 1.9 million lie within 1e-6; a step is a sixteenth of the value or more.
REACH = 1e-5
MOST_APART = 1e-4  # as a share of all roundings

pytestmark = pytest.mark.skipif(not (SHIPPED / "config.json").is_file(), reason=f"no checkpoint in {SHIPPED}")


@pytest.fixture(scope="module")
def documents() -> list[list[int]]:
    """Stories, repetitions and tasks in turn, NUM_POSITIONS ids in all."""
    tokenizer = Tokenizer.open(SHIPPED, vocab_size=Checkpoint.open(SHIPPED).config.vocab_size)
    book, found, left = load_story_book(), [], NUM_POSITIONS
    while left:
        kind = ("stories", "echoes", "tasks")[len(found) % 3]
        ids = tokenizer.encode(document(SEED, len(found), kind=kind, book=book))
        found.append(ids[: min(left, LONGEST)])
        left -= len(found[-1])
    assert len(found) > 5
    return found


def engine_logits(checkpoint: Checkpoint, ids: list[int], ops) -> np.ndarray:
    model = OpenModel(checkpoint, plan_of(checkpoint, context=len(ids)), ops, poison=True)
    try:
        return model.run_pass(ids, layer_done=lambda layer: None, all_rows=True)
    finally:
        model.close()


def trainer_logits(model, ids: list[int]) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor([ids]))[0].numpy()


def assert_agree(found_TW: np.ndarray, expected_TW: np.ndarray) -> None:
    apart = np.abs(found_TW - expected_TW).max()
    print(f"{len(found_TW)} positions, at most {apart:.1e} apart")
    assert apart <= BOUND
    assert found_TW.argmax(axis=1).tolist() == expected_TW.argmax(axis=1).tolist()


def best_ops():
    return make_ops((native_isas() or ["reference"])[0])


def test_engine_and_trainer_agree_on_every_position(documents: list[list[int]]) -> None:
    checkpoint = Checkpoint.open(SHIPPED)
    model = load_checkpoint(SHIPPED).quantise_experts(weights="mxfp4", activations="none").eval()
    for ids in documents:
        assert_agree(trainer_logits(model, ids), engine_logits(checkpoint, ids, best_ops()))


def test_with_rounded_inputs_they_agree_but_for_what_lies_on_a_border(documents: list[list[int]]) -> None:
    """Where the trainer would round an input to the other side of a border that it all but lies on, it is
    told the engine's side; left alone, one such rounding moves the logits of the positions after it by
    up to a tenth (docs/log.md)."""
    checkpoint = Checkpoint.open(SHIPPED, expert_activations="mxfp8")
    model = load_checkpoint(SHIPPED).quantise_experts(weights="mxfp4", activations="mxfp8").eval()
    num_told = num_rounded = 0
    for ids in documents:
        listener = Listener(best_ops())
        logits_TW = engine_logits(checkpoint, ids, listener.ops)
        assert np.array_equal(logits_TW, engine_logits(checkpoint, ids, best_ops()))
        told = tell(model, listener.layers, reach=REACH)
        assert_agree(trainer_logits(model, ids), logits_TW)
        num_told += sum(one.num_told for one in told)
        num_rounded += sum(one.num_rounded for one in told)
    print(f"{num_told} of {num_rounded:,} inputs rounded apart")
    assert num_rounded > NUM_POSITIONS * LONGEST
    assert num_told <= MOST_APART * num_rounded


def test_rounding_is_not_inert(documents: list[list[int]]) -> None:
    """The two choices are further apart than the bound by far, so that agreement says something."""
    plain, rounded = (
        engine_logits(Checkpoint.open(SHIPPED, expert_activations=kind), documents[0], best_ops())
        for kind in ("f32", "mxfp8")
    )
    assert np.abs(plain - rounded).max() > 100 * BOUND
