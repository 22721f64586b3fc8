"""The checkpoint that ships: whole, small, described, and able to tell a story."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the training half needs torch (pip install 'twoends[train]')")

import twoends  # noqa: E402
from twoends.checkpoint.config import read_config  # noqa: E402
from twoends.checkpoint.draft_config import (  # noqa: E402
    read_draft_config,
    refuse_other_target,
    tokenizer_digest,
)
from twoends.checkpoint.draft_file import DraftFile  # noqa: E402
from twoends.checkpoint.shipped import SHIPPED_DRAFT  # noqa: E402
from twoends.train.bpe import read_rank_file, tokenizer_files  # noqa: E402
from twoends.train.export import model_config  # noqa: E402
from twoends.train.recipe import preset  # noqa: E402
from twoends.train.stories import document, load_story_book  # noqa: E402

# One row at a time gains nothing from a second thread; on a busy machine waiting for it takes minutes.
torch.set_num_threads(1)

SHIPPED = Path(twoends.__file__).parent / "assets" / "nano"

pytestmark = pytest.mark.skipif(not (SHIPPED / "config.json").is_file(), reason=f"no checkpoint in {SHIPPED}")


def test_it_is_what_the_preset_describes() -> None:
    assert read_config(SHIPPED) == model_config(preset("nano").model)


def test_it_fits_into_a_repository() -> None:
    assert sum(path.stat().st_size for path in SHIPPED.iterdir()) < 14_000_000


@pytest.mark.parametrize("heading", ["Data and licence", "How it was made", "How good it is", "Samples"])
def test_its_card_has_the_section(heading: str) -> None:
    assert f"\n## {heading}\n" in (SHIPPED / "README.md").read_text(encoding="utf-8")


def test_its_tokenizer_files_are_those_of_its_ranks() -> None:
    files = tokenizer_files(read_rank_file(SHIPPED / "tiktoken.model"))
    assert {name: (SHIPPED / name).read_text() for name in files} == files


def test_it_goes_on_with_a_story_in_words_that_stories_are_made_of() -> None:
    book = load_story_book()
    with twoends.open_model(SHIPPED, threads=1, context=128) as model:
        sampling = twoends.Sampling(temperature=0.5, seed=1)
        text = model.generate("Once upon a time", num_new=60, sampling=sampling).text
    known = set(re.findall(r"\w+", " ".join(document(1, i, kind="stories", book=book) for i in range(2000))))
    words = re.findall(r"\w+", text)[:-1]
    # One word in twenty may be new; a model that babbles invents one in three.
    assert sum(word not in known for word in words) <= len(words) / 20
    assert len(words) > 25


DRAFT = SHIPPED.parent / SHIPPED_DRAFT
drafts = pytest.mark.skipif(not (DRAFT / "config.json").is_file(), reason=f"no draft layer in {DRAFT}")


@drafts
def test_the_draft_that_ships_is_small_and_made_for_the_model_that_ships() -> None:
    assert sum(path.stat().st_size for path in DRAFT.iterdir()) < 600_000
    target = read_config(SHIPPED)
    given = {"target_name": "nano", "draft_name": DRAFT.name, "tokenizer": tokenizer_digest(SHIPPED)}
    refuse_other_target(read_draft_config(DRAFT), target, **given)
    DraftFile.open(DRAFT, target).read()


@drafts
@pytest.mark.parametrize("heading", ["How it was made", "How often it is right"])
def test_the_card_of_the_draft_has_the_section(heading: str) -> None:
    assert f"\n## {heading}\n" in (DRAFT / "README.md").read_text(encoding="utf-8")
