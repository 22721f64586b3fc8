"""From a corpus folder to what a run needs: the tokenizer's ranks and the packed rows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from twoends.errors import OptionError
from twoends.train.bpe import encoding, rank_file, read_rank_file, train_ranks
from twoends.train.corpus import mixed_documents, read_documents
from twoends.train.loop import Text, write_text_atomically
from twoends.train.recipe import Recipe
from twoends.train.rows import pack_rows, token_bytes

# Enough rows to tell a difference of a hundredth of a bit, few enough to evaluate in seconds.
_HELDOUT_ROWS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Ranks of the tokenizer and the text in rows."""

    ranks: list[bytes]
    text: Text


def learn_ranks(recipe: Recipe, *, corpus_dir: Path, path: Path) -> list[bytes]:
    """The vocabulary in `path`; learnt from the recipe's mixture, or copied from its file, if not there yet.

    Raises OptionError for a given file that has another number of ranks than the recipe says.
    """
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        text = _given_ranks(recipe) if recipe.tokenizer.file else _learnt_ranks(recipe, corpus_dir)
        write_text_atomically(path, text)
    ranks = read_rank_file(path)
    if len(ranks) != recipe.tokenizer.num_ranks:
        raise OptionError(
            f"{path} holds {len(ranks):,} ranks; the recipe says {recipe.tokenizer.num_ranks:,}.",
            remedies=["Set num_ranks to what the file holds, or leave `file` empty."],
        )
    return ranks


def _given_ranks(recipe: Recipe) -> str:
    path = Path(recipe.tokenizer.file)
    if not path.is_file():
        raise OptionError(f"the recipe names the tokenizer file {path}, which isn't there.")
    return path.read_text(encoding="ascii")


def _learnt_ranks(recipe: Recipe, corpus_dir: Path) -> str:
    sample, size = [], 0
    for text in _documents(recipe, corpus_dir):
        if size >= recipe.tokenizer.sample_characters:
            break
        sample.append(text)
        size += len(text)
    return rank_file(train_ranks(sample, num_ranks=recipe.tokenizer.num_ranks))


def _documents(recipe: Recipe, corpus_dir: Path) -> list[str]:
    data = recipe.data
    return mixed_documents(corpus_dir, shares=data.shares, characters=data.characters, seed=recipe.train.seed)


def prepare(recipe: Recipe, *, corpus_dir: Path, out_dir: Path) -> Prepared:
    """Learn the vocabulary, kept in out_dir so that a resumed run has the same, and pack the text."""
    ranks = learn_ranks(recipe, corpus_dir=corpus_dir, path=out_dir / "tiktoken.model")
    encoder, tokens, eos = encoding(ranks), recipe.train.row_tokens, recipe.model.eos_token_id
    heldout = {
        source: pack_rows(
            read_documents(corpus_dir, source=source, split="heldout")[: 40 * _HELDOUT_ROWS],
            encoder=encoder, row_tokens=tokens, eos=eos,
        )[:_HELDOUT_ROWS]
        for source in recipe.data.shares
    }  # fmt: skip
    rows = pack_rows(_documents(recipe, corpus_dir), encoder=encoder, row_tokens=tokens, eos=eos)
    return Prepared(ranks=ranks, text=Text(rows=rows, heldout=heldout, bytes_of_id=token_bytes(encoder)))
