"""From a corpus folder to what a run needs: the tokenizer's ranks and the packed rows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from twoends.train.bpe import encoding, rank_file, read_rank_file, train_ranks
from twoends.train.corpus import mixed_documents, read_documents
from twoends.train.loop import Text, write_atomically
from twoends.train.recipe import Recipe
from twoends.train.rows import pack_rows, token_bytes

# Enough rows to tell a difference of a hundredth of a bit, few enough to evaluate in seconds.
_HELDOUT_ROWS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Ranks of the tokenizer and the text in rows."""

    ranks: list[bytes]
    text: Text


def prepare(recipe: Recipe, *, corpus_dir: Path, out_dir: Path) -> Prepared:
    """Learn the vocabulary, kept in out_dir so that a resumed run has the same, and pack the text."""
    data, seed = recipe.data, recipe.train.seed
    documents = mixed_documents(corpus_dir, shares=data.shares, characters=data.characters, seed=seed)
    path = out_dir / "tiktoken.model"
    if not path.is_file():
        out_dir.mkdir(parents=True, exist_ok=True)
        sample, size = [], 0
        for text in documents:
            if size >= recipe.tokenizer.sample_characters:
                break
            sample.append(text)
            size += len(text)
        learnt = rank_file(train_ranks(sample, num_ranks=recipe.tokenizer.num_ranks))
        write_atomically(path, lambda partial: partial.write_text(learnt, encoding="ascii"))
    ranks = read_rank_file(path)
    encoder, tokens, eos = encoding(ranks), recipe.train.row_tokens, recipe.model.eos_token_id
    heldout = {
        source: pack_rows(
            read_documents(corpus_dir, source=source, split="heldout")[: 40 * _HELDOUT_ROWS],
            encoder=encoder, row_tokens=tokens, eos=eos,
        )[:_HELDOUT_ROWS]
        for source in data.shares
    }  # fmt: skip
    rows = pack_rows(documents, encoder=encoder, row_tokens=tokens, eos=eos)
    return Prepared(ranks=ranks, text=Text(rows=rows, heldout=heldout, bytes_of_id=token_bytes(encoder)))
