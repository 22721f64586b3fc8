"""Runs a tiny checkpoint through the real engine, with every choice that must not matter as an argument."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.backends import native
from twoends.checkpoint.draft_file import DraftFile
from twoends.engine.budget import Plan, make_plan
from twoends.engine.files import read_at
from twoends.engine.open import Checkpoint, OpenModel
from twoends.engine.profile import ExpertProfile
from twoends.engine.trace import Counters, Trace
from twoends.generate.draft_layer import LayerDrafter
from twoends.generate.draft_model import DraftModel
from twoends.generate.generator import Generator
from twoends.generate.sampler import Sampling
from twoends.generate.session import read_session, restore_state, save_session
from twoends.generate.stream import TextStream
from twoends.generate.tokenizer import Tokenizer
from twoends.kernels.ops import Ops
from twoends.kernels.reference import reference_ops

PROMPT = [5, 17, 300, 42, 63, 0, 17, 9, 31, 255, 256, 511]


class Silent:
    """A Progress that draws nothing."""

    def prefill(self, done, total):
        pass

    def layer(self, done):
        pass

    def token(self, token_id, piece):
        pass

    def rest(self, text):
        pass


@dataclass(slots=True)
class Run:
    """What a run gave, and what it did."""

    ids: list[int] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    counters: Counters | None = None
    plan: Plan | None = None
    drafted: int = 0
    accepted: int = 0
    profile: ExpertProfile | None = None
    drafts: dict = field(default_factory=dict)


def plan_of(
    checkpoint: Checkpoint,
    *,
    budget="ample",
    chunk=None,
    context=64,
    draft=0,
    sequences=1,
    look_ahead="off",
) -> Plan:
    """`budget` is "floor", "ample", bytes above the floor, or a share of the floor above it (float)."""

    def make(ram_bytes):
        return make_plan(
            checkpoint.config,
            checkpoint.index,
            ram_bytes=ram_bytes,
            program_bytes=0,
            context_tokens=context,
            chunk_tokens=chunk,
            draft_tokens=draft,
            num_sequences=sequences,
            look_ahead=look_ahead,
        )

    ample = make(10**12)
    if budget == "ample":
        return ample
    floor = ample.floor_bytes
    if budget == "floor":
        return make(floor)
    # The program's part of the floor is the same for every model, so a share is of the rest.
    rest = sum(row.num_bytes for row in ample.floor_rows if row.name != "program")
    return make(floor + round(budget * rest))


def tokenizer_of(checkpoint: Checkpoint) -> Tokenizer:
    """The checkpoint's tokenizer, opened once for all runs."""
    return _open_tokenizer(checkpoint.directory, checkpoint.config.vocab_size)


@functools.cache
def _open_tokenizer(directory: Path, vocab_size: int) -> Tokenizer:
    return Tokenizer.open(directory, vocab_size=vocab_size)


def make_ops(isa: str, threads: int = 1) -> Ops:
    return reference_ops() if isa == "reference" else native(isa, threads)


def run(
    checkpoint: Checkpoint,
    *,
    ops: Ops,
    num_new: int,
    budget="ample",
    chunk=None,
    draft=0,
    draft_model: Checkpoint | DraftFile | None = None,
    earlier=(),
    look_ahead="off",
    policy="decayed",
    sampling=None,
    save_after: int | None = None,
    tmp_path: Path | None = None,
    prompt=PROMPT,
    read=read_at,
    read_shape=None,
    profile=None,
    trace: Path | None = None,
) -> Run:
    """`num_new` ids; with `save_after`, through a session file after so many of them."""
    result = Run()
    parts = [num_new] if save_after is None else [save_after, num_new - save_after]
    ids = list(prompt)
    for part, count in enumerate(parts):
        plan = plan_of(
            checkpoint,
            budget=budget,
            chunk=chunk,
            draft=draft,
            context=len(prompt) + num_new,
            look_ahead=look_ahead,
        )
        model = OpenModel(
            checkpoint,
            plan,
            ops,
            policy=policy,
            poison=True,
            read=read,
            read_shape=read_shape,
            profile=profile,
            look_ahead=look_ahead,
            trace=Trace(trace) if trace else None,
        )
        guesses = None
        try:
            if isinstance(draft_model, Checkpoint):
                guesses = open_draft(draft_model, ops, context=len(prompt) + num_new)
            if part:
                saved = read_session(tmp_path / "s", checkpoint=checkpoint)
                restore_state(saved, model.state)
                # pytest keeps what tests leave behind, and the whole matrix breaks 1,440 runs.
                (tmp_path / "s").unlink()
                ids = saved.ids
            tokenizer = tokenizer_of(checkpoint)
            drafter = None if guesses is None else DraftModel(guesses, sampling=sampling or Sampling())
            if isinstance(draft_model, DraftFile):
                drafter = LayerDrafter(draft_model, model, sampling=sampling or Sampling())
            generator = Generator(
                model, ids, chunk=plan.chunk_tokens, earlier_ids=list(earlier), draft_model=drafter
            )
            outcome = generator.run(
                num_new=count,
                sampling=sampling or Sampling(),
                stream=TextStream(tokenizer, stop_strings=(), stop_ids=frozenset()),
                progress=Silent(),
                stop_asked=lambda: False,
            )
            if part + 1 < len(parts):
                save_session(tmp_path / "s", checkpoint=checkpoint, ids=ids, state=model.state)
        finally:
            model.close()
            if guesses is not None:
                guesses.close()
        result.ids += outcome.ids
        result.digests += outcome.position_digests
        result.drafted += outcome.num_drafted
        result.accepted += outcome.num_accepted
        result.counters, result.plan, result.drafts = model.counters, plan, outcome.drafts
        if policy == "decayed":
            result.profile = model.profile
    return result


def open_draft(checkpoint: Checkpoint, ops: Ops, *, context: int, budget="ample") -> OpenModel:
    """A draft model; in an ample budget its guesses read nothing."""
    plan = plan_of(checkpoint, budget=budget, chunk=3, context=context)
    return OpenModel(checkpoint, plan, ops, poison=True)
