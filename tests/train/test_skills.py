"""Which parts of a task are its answers, and how they are counted."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the training half needs torch (pip install 'twoends[train]')")

from tests.train.models import tiny_architecture  # noqa: E402
from twoends.train.bpe import byte_order, encoding  # noqa: E402
from twoends.train.model import KimiK3  # noqa: E402
from twoends.train.skills import ANSWERS, answer_spans, answered  # noqa: E402
from twoends.train.stories import document, load_story_book  # noqa: E402


@pytest.mark.parametrize(
    ("text", "task", "answer"),
    [
        ("3 + 4 = 7\n9 - 2 = 7", "addition", " 7"),
        ("3 + 4 = 7\n9 - 2 = 7", "subtraction", " 7"),
        (
            "Mia has the cup.\nWhat does Mia have? Mia has the cup.",
            "what does X have",
            " the cup",
        ),
        ("Mia has the red cup.\nWho has the red cup? Mia has the red cup.", "who has X", " Mia"),
        ("Sort: b, a.\nSorted: a, b.", "sort by letter", " a, b."),
    ],
)
def test_an_answer_is_found_with_the_text_before_it(text: str, task: str, answer: str) -> None:
    found = {name: (before, said) for name, before, said in answer_spans(text)}
    before, said = found[task]
    assert said == answer
    assert text.startswith(before + said)


def test_the_generator_asks_every_kind_of_task() -> None:
    book = load_story_book()
    texts = [document(1, i, kind="tasks", book=book) for i in range(300)]
    assert {task for text in texts for task, _, _ in answer_spans(text)} == set(ANSWERS)


def test_a_model_that_always_says_seven_is_right_when_the_answer_is_seven() -> None:
    encoder = encoding(byte_order())
    model = KimiK3(tiny_architecture(vocab_size=512)).initialise(1)
    ids = encoder.encode_ordinary(" 7")
    model.forward = lambda ids_BT: torch.nn.functional.one_hot(ids_BT.roll(-1, 1) * 0 + ids[1], 512).float()
    texts = ["1 + 6 = 7", "1 + 7 = 8", "2 + 5 = 7"]
    assert answered(model, texts, encoder=encoder, per_task=9) == {"addition": (0, 3)}
    model.forward = lambda ids_BT: torch.nn.functional.one_hot(
        torch.where(ids_BT == ids[0], ids[1], ids[0]), 512
    ).float()
    assert answered(model, texts, encoder=encoder, per_task=9) == {"addition": (2, 3)}
