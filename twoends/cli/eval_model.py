"""The work of `twoends eval`: read the texts, plan, score one after the other, tell."""

from __future__ import annotations

import json
from pathlib import Path

from twoends.checkpoint.shipped import shipped_model
from twoends.cli import load
from twoends.cli.command import Values
from twoends.cli.screen import Screen, columns, progress_bar
from twoends.engine.device import shape_under
from twoends.engine.memory import peak_resident_bytes
from twoends.engine.open import Checkpoint, OpenModel
from twoends.engine.trace import Trace
from twoends.errors import OptionError
from twoends.generate.score import NOTHING, Score, score_ids
from twoends.generate.tokenizer import Tokenizer
from twoends.units import format_bytes

# Longest window where --context says nothing: what a text of any length is cut into.
_WINDOW = 4096


def evaluate(values: Values, screen: Screen) -> None:
    """`twoends eval`. Raises OptionError for a text that can't be read or is too short, DoesNotFit."""
    directory = shipped_model() if values.model is None else Path(values.model)
    checkpoint = Checkpoint.open(directory, source=values.source)
    tokenizer = load.open_tokenizer(checkpoint, needed=True)
    assert tokenizer is not None, "it was needed"
    texts = {str(path): _ids(path, tokenizer) for path in values.text}
    choice = load.choose_kernels(values)
    context = values.context or min(_WINDOW, max(len(ids) for ids in texts.values()))
    chunk = min(values.chunk, context)
    plan = checkpoint.plan(
        ram_bytes=load.budget_bytes(values),
        context_tokens=context,
        chunk_tokens=chunk,
        # Logits of every row of a pass are kept, as when a draft is verified.
        draft_tokens=chunk - 1,
        reference=choice.ops.backend == "reference",
    )
    trace = None if values.trace is None else Trace(values.trace)
    model = OpenModel(checkpoint, plan, choice.ops, trace=trace, read_shape=shape_under(checkpoint.directory))
    try:
        scores = {
            name: _score(name, ids, model, tokenizer, chunk=chunk, screen=screen)
            for name, ids in texts.items()
        }
    finally:
        model.close()
    screen.clear_live()
    screen.note(f"  peak {format_bytes(peak_resident_bytes())} of {format_bytes(plan.ram_bytes)}")
    _tell(scores, values, screen)


def _ids(path: Path, tokenizer: Tokenizer) -> list[int]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise OptionError(f"{path} can't be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise OptionError(f"{path} is not UTF-8: {error.reason} at byte {error.start:,}.") from None
    ids = tokenizer.encode(text)
    if len(ids) < 2:
        raise OptionError(f"{path} holds fewer than two tokens: there is nothing to foretell.")
    return ids


def _score(
    name: str, ids: list[int], model: OpenModel, tokenizer: Tokenizer, *, chunk: int, screen: Screen
) -> Score:
    def progress(done: int) -> None:
        screen.live(f"  {name} {progress_bar(done / len(ids), 12)} {done:,} of {len(ids):,} tokens")

    return score_ids(
        model,
        ids,
        bytes_of=lambda token_id: len(tokenizer.token_bytes(token_id)),
        chunk=chunk,
        progress=progress,
    )


def _tell(scores: dict[str, Score], values: Values, screen: Screen) -> None:
    total = sum(scores.values(), NOTHING)
    if values.json:
        found = {name: _figures(score) for name, score in scores.items()}
        screen.line(json.dumps({"texts": found, "all": _figures(total)}))
        return
    rows: list[tuple[str, ...]] = [("text", "tokens", "bytes", "bits per byte", "right")]
    rows += [_row(name, score) for name, score in scores.items()]
    if len(scores) > 1:
        rows.append(_row("all", total))
    for line in columns(rows, right=(1, 2, 3, 4)):
        screen.line(line)


def _figures(score: Score) -> dict[str, float]:
    return {
        "tokens": score.num_tokens,
        "bytes": score.num_bytes,
        "bits_per_byte": score.bits_per_byte,
        "accuracy": score.accuracy,
    }


def _row(name: str, score: Score) -> tuple[str, ...]:
    bits, right = f"{score.bits_per_byte:.4f}", f"{100 * score.accuracy:.1f} %"
    return name, f"{score.num_tokens:,}", f"{score.num_bytes:,}", bits, right
