"""The part of `twoends run` that a draft model or draft layer has: found fit, planned, opened, reported."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from twoends.checkpoint.config import read_config
from twoends.checkpoint.draft_config import (
    is_draft_layer,
    read_draft_config,
    refuse_other_target,
    tokenizer_digest,
)
from twoends.checkpoint.draft_file import DraftFile
from twoends.checkpoint.shipped import SHIPPED_DRAFT, shipped_draft
from twoends.cli import load
from twoends.cli.command import Values
from twoends.engine.arena import align_up
from twoends.engine.budget import Plan, Row
from twoends.engine.device import shape_under
from twoends.engine.open import Checkpoint, OpenModel
from twoends.errors import OptionError
from twoends.generate.draft_layer import LayerDrafter, layer_draft_bytes
from twoends.generate.draft_length import MAX_DRAFT
from twoends.generate.draft_model import DraftModel, plan_draft_model, refuse_other_vocabulary
from twoends.generate.drafts import Drafter, lookup_row
from twoends.generate.sampler import Sampling
from twoends.generate.session import read_session
from twoends.kernels.choose import Choice


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenDraft:
    """A drafter at work; `bytes_read` are those that the run's own counters don't have."""

    drafter: Drafter
    close: Callable[[], None]
    bytes_read: Callable[[], int]


class DraftJob(Protocol):
    """A draft model or layer that fits; `num_bytes` is what it adds to the run's plan."""

    @property
    def directory(self) -> Path:
        """Where it lies."""

    @property
    def fingerprint(self) -> str:
        """Tells drafts apart."""

    @property
    def num_bytes(self) -> int:
        """Memory beside the run's own."""

    @property
    def row(self) -> Row:
        """Its line in the run's plan."""

    def open(self, model: OpenModel, values: Values, choice: Choice, sampling: Sampling) -> OpenDraft:
        """The drafter for a model that is open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDraft:
    """A smaller checkpoint with the same tokenizer."""

    checkpoint: Checkpoint
    plan: Plan
    num_bytes: int

    @property
    def directory(self) -> Path:
        """The checkpoint's."""
        return self.checkpoint.directory

    @property
    def fingerprint(self) -> str:
        """The checkpoint's."""
        return self.checkpoint.index.fingerprint

    @property
    def row(self) -> Row:
        """Its line in the run's plan."""
        name = self.directory.name
        return Row(name="draft model", num_bytes=align_up(self.num_bytes), remark=f"{name}, its state twice")

    def open(self, model: OpenModel, values: Values, choice: Choice, sampling: Sampling) -> OpenDraft:
        """With the run's kernels and way of reading."""
        draft = OpenModel(
            self.checkpoint,
            self.plan,
            choice.ops,
            direct=not values.no_direct,
            read_shape=shape_under(self.directory),
        )
        drafter = DraftModel(draft, sampling=sampling)
        return OpenDraft(drafter=drafter, close=draft.close, bytes_read=lambda: draft.counters.bytes_read)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerDraft:
    """One layer that was trained for the model of this run."""

    file: DraftFile
    num_bytes: int

    @property
    def directory(self) -> Path:
        """The folder that `train --draft-of` wrote."""
        return self.file.directory

    @property
    def fingerprint(self) -> str:
        """A digest of its weights."""
        with self.file.header.path.open("rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()

    @property
    def row(self) -> Row:
        """Its line in the run's plan."""
        name = self.directory.name
        return Row(name="draft layer", num_bytes=align_up(self.num_bytes), remark=f"{name}, a head beside it")

    def open(self, model: OpenModel, values: Values, choice: Choice, sampling: Sampling) -> OpenDraft:
        """It reads its file; the model's head and embedding rows are reads of the run."""
        drafter = LayerDrafter(self.file, model, sampling=sampling)
        return OpenDraft(drafter=drafter, close=lambda: None, bytes_read=lambda: self.file.num_bytes)


def prepare_draft_model(
    values: Values, checkpoint: Checkpoint, *, ram_bytes: int, context_tokens: int
) -> DraftJob | None:
    """--draft-model, if given. Raises OptionError for another model's, and what opening raises."""
    if values.draft_model is None:
        return None
    directory = _draft_directory(values.draft_model)
    if is_draft_layer(directory):
        return _prepare_layer(values, directory, checkpoint, context_tokens=context_tokens)
    draft = Checkpoint.open(directory)
    refuse_other_vocabulary(
        checkpoint,
        load.open_tokenizer(checkpoint, needed=False),
        draft,
        load.open_tokenizer(draft, needed=False),
    )
    plan, num_bytes = plan_draft_model(draft, ram_bytes=ram_bytes, context_tokens=context_tokens)
    return ModelDraft(checkpoint=draft, plan=plan, num_bytes=num_bytes)


def _draft_directory(given: Path) -> Path:
    """The folder that is meant; the name of the draft that ships stands for its place."""
    return shipped_draft() if str(given) == SHIPPED_DRAFT and not given.exists() else given


def _prepare_layer(
    values: Values, directory: Path, checkpoint: Checkpoint, *, context_tokens: int
) -> LayerDraft:
    target = read_config(checkpoint.directory)
    refuse_other_target(
        read_draft_config(directory),
        target,
        target_name=checkpoint.directory.name,
        draft_name=directory.name,
        tokenizer=tokenizer_digest(checkpoint.directory),
    )
    file = DraftFile.open(directory, target)
    num_bytes = layer_draft_bytes(
        file,
        checkpoint,
        context_tokens=context_tokens,
        chunk_tokens=values.chunk,
        draft_tokens=draft_tokens(values),
    )
    return LayerDraft(file=file, num_bytes=num_bytes)


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
        "model": str(job.directory),
        "fingerprint": job.fingerprint,
        "num_bytes": job.num_bytes,
        "bytes_read": bytes_read,
    }
