"""The part of `twoends run` that a draft model has: opened, found fit, planned, reported."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twoends.cli import load
from twoends.cli.command import Values
from twoends.engine.arena import align_up
from twoends.engine.budget import Plan, Row
from twoends.engine.device import shape_under
from twoends.engine.open import Checkpoint, OpenModel
from twoends.errors import OptionError
from twoends.generate.draft_length import MAX_DRAFT
from twoends.generate.draft_model import plan_draft_model, refuse_other_vocabulary
from twoends.generate.drafts import lookup_row
from twoends.generate.session import read_session
from twoends.kernels.choose import Choice


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftJob:
    """A draft model that fits; `num_bytes` is what it adds to the run's plan."""

    checkpoint: Checkpoint
    plan: Plan
    num_bytes: int

    @property
    def row(self) -> Row:
        """Its line in the run's plan."""
        name = self.checkpoint.directory.name
        return Row(name="draft model", num_bytes=align_up(self.num_bytes), remark=f"{name}, its state twice")

    def open(self, values: Values, choice: Choice) -> OpenModel:
        """The model with the run's kernels and way of reading."""
        return OpenModel(
            self.checkpoint,
            self.plan,
            choice.ops,
            direct=not values.no_direct,
            read_shape=shape_under(self.checkpoint.directory),
        )


def prepare_draft_model(
    values: Values, checkpoint: Checkpoint, *, ram_bytes: int, context_tokens: int
) -> DraftJob | None:
    """--draft-model, if given. Raises OptionError for another tokenizer, and what opening raises."""
    if values.draft_model is None:
        return None
    draft = Checkpoint.open(values.draft_model)
    refuse_other_vocabulary(
        checkpoint,
        load.open_tokenizer(checkpoint, needed=False),
        draft,
        load.open_tokenizer(draft, needed=False),
    )
    plan, num_bytes = plan_draft_model(draft, ram_bytes=ram_bytes, context_tokens=context_tokens)
    return DraftJob(checkpoint=draft, plan=plan, num_bytes=num_bytes)


def draft_tokens(values: Values) -> int:
    """--draft; with something to guess from and no number, as many as can ever pay. Raises OptionError."""
    named = [flag for flag, given in _sources(values) if given is not None]
    if "draft" not in values.given:
        return MAX_DRAFT if named else 0
    if named and not values.draft:
        raise OptionError(
            f"--draft 0 lets nothing be guessed; {named[0]} is there to guess.",
            remedies=["Leave one of the two out."],
        )
    return int(values.draft)


def draft_rows(draft: DraftJob | None, *, draft_tokens: int, num_tokens: int) -> tuple[Row, ...]:
    """What guessing holds beside the engine; the lookup goes over `num_tokens`."""
    lookup = (lookup_row(num_tokens),) if draft_tokens else ()
    return lookup if draft is None else (*lookup, draft.row)


def earlier_ids(values: Values, checkpoint: Checkpoint) -> list[int]:
    """The ids of the session of --draft-from, if given. Raises SessionError for another model's."""
    return [] if values.draft_from is None else read_session(values.draft_from, checkpoint=checkpoint).ids


def _sources(values: Values) -> tuple[tuple[str, Path | None], ...]:
    return (("--draft-model", values.draft_model), ("--draft-from", values.draft_from))


def draft_model_object(job: DraftJob | None, bytes_read: int) -> dict[str, Any] | None:
    """What --json says of the draft model; its reads are counted apart from the run's."""
    if job is None:
        return None
    return {
        "model": str(job.checkpoint.directory),
        "fingerprint": job.checkpoint.index.fingerprint,
        "num_bytes": job.num_bytes,
        "bytes_read": bytes_read,
    }
