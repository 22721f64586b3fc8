"""The work of `twoends run`, in order: open, tokenize, choose kernels, plan, generate, save, report."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from twoends.cli import load
from twoends.cli.command import Values
from twoends.cli.live import RunProgress
from twoends.cli.narrate import say_what_runs
from twoends.cli.report import RunReport, draw_card, run_object
from twoends.cli.run_draft import (
    DraftJob,
    OpenDraft,
    draft_rows,
    draft_tokens,
    earlier_ids,
    prepare_draft_model,
)
from twoends.cli.screen import Screen
from twoends.cli.stop import StopSignals
from twoends.engine.budget import Plan
from twoends.engine.device import rate_under, shape_under
from twoends.engine.memory import peak_resident_bytes
from twoends.engine.open import Checkpoint, OpenModel
from twoends.engine.profile import ExpertProfile, write_profile
from twoends.engine.trace import Trace
from twoends.errors import NotSound, OptionError, TwoendsError
from twoends.generate.generator import Generator, Outcome
from twoends.generate.sampler import Sampling
from twoends.generate.session import SavedSession, read_session, restore_state, save_session
from twoends.generate.stream import TextStream
from twoends.generate.tokenizer import Tokenizer
from twoends.kernels.choose import Choice
from twoends.units import format_bytes

# Options that say what to begin with, not how to go on.
_NOT_REPEATED = {"ids", "n", "load", "save", "save_profile", "trace", "json", "debug"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A run whose every option was found right; no weight was read yet."""

    values: Values
    checkpoint: Checkpoint
    tokenizer: Tokenizer | None
    saved: SavedSession | None
    profile: ExpertProfile | None
    ids: list[int]
    sampling: Sampling
    choice: Choice
    plan: Plan
    draft: DraftJob | None
    earlier_ids: list[int]


def run(values: Values, screen: Screen) -> None:
    """`twoends run`. Raises what the card can't say: the errors of errors.py."""
    job = prepare(values)
    began = time.perf_counter()
    with StopSignals(screen) as stop:
        try:
            with contextlib.ExitStack() as opened:
                model = _open_model(job)
                opened.callback(model.close)
                draft = None
                if job.draft is not None:
                    draft = job.draft.open(model, values, job.choice, job.sampling)
                    opened.callback(draft.close)
                outcome, session, trouble = _generate_and_save(job, model, draft, screen=screen, stop=stop)
        except KeyboardInterrupt:
            raise _aborted(values) from None
    report = RunReport(
        model=job.checkpoint.directory,
        fingerprint=job.checkpoint.index.fingerprint,
        prompt_ids=job.ids,
        outcome=outcome,
        plan=job.plan,
        counters=model.counters,
        choice=job.choice,
        files=model.files,
        read_shape=model.read_shape,
        disk=rate_under(job.checkpoint.directory),
        policy=values.policy,
        held_bytes=model.held_bytes,
        peak_bytes=peak_resident_bytes(),
        wall_s=time.perf_counter() - began,
        session=session,
        draft=job.draft,
        draft_bytes_read=0 if draft is None else draft.bytes_read(),
    )
    if values.json:
        screen.line(json.dumps(run_object(report)))
    else:
        screen.end_text()
        draw_card(report, screen)
    _raise_what_went_wrong(report, values, trouble)


def prepare(values: Values) -> Job:
    """Everything that can be refused is refused here. Raises OptionError, ConfigError, DoesNotFit..."""
    sampling = Sampling(
        temperature=values.temperature, top_p=values.top_p, top_k=values.top_k, seed=values.seed
    )
    directory, prompt = load.model_and_prompt(values.model, values.prompt, no_prompt=values.ids is not None)
    if prompt is not None and values.ids is not None:
        raise OptionError("a prompt and --ids both say what to continue; give one of them.")
    checkpoint = Checkpoint.open(
        directory,
        latent_eps=values.latent_eps,
        expert_activations=values.expert_activations,
        source=values.source,
    )
    tokenizer = load.open_tokenizer(checkpoint, needed=prompt is not None or bool(values.stop))
    saved = None if values.load is None else read_session(values.load, checkpoint=checkpoint)
    ids = [*([] if saved is None else saved.ids), *_prompt_ids(values.ids, prompt, tokenizer)]
    _check_ids(ids, checkpoint)
    context = _context(values, len(ids) + values.n)
    choice = load.choose_kernels(values)
    profile = _profile(values, checkpoint)
    ram_bytes = load.budget_bytes(values)
    num_drafts = draft_tokens(values)
    earlier = earlier_ids(values, checkpoint)
    draft = prepare_draft_model(values, checkpoint, ram_bytes=ram_bytes, context_tokens=context)
    plan = checkpoint.plan(
        ram_bytes=ram_bytes,
        context_tokens=context,
        chunk_tokens=values.chunk,
        draft_tokens=num_drafts,
        more_rows=draft_rows(draft, draft_tokens=num_drafts, num_tokens=context + len(earlier)),
        curve=None if profile is None else profile.curve,
        look_ahead=values.look_ahead,
        reference=choice.ops.backend == "reference",
    )
    return Job(
        values=values,
        checkpoint=checkpoint,
        tokenizer=tokenizer,
        saved=saved,
        profile=profile,
        ids=ids,
        sampling=sampling,
        choice=choice,
        plan=plan,
        draft=draft,
        earlier_ids=earlier,
    )


class _NoText:
    """Stands in for a tokenizer where a checkpoint has none: ids have no text."""

    def is_special(self, token_id: int) -> bool:
        return False

    def token_bytes(self, token_id: int) -> bytes:
        return b""


def stand_in_tokenizer() -> Tokenizer:
    """Stands for the tokenizer that a checkpoint doesn't have."""
    return cast(Tokenizer, _NoText())


def _open_model(job: Job) -> OpenModel:
    return OpenModel(
        job.checkpoint,
        job.plan,
        job.choice.ops,
        policy=job.values.policy,
        trace=open_trace(job.values.trace),
        direct=not job.values.no_direct,
        read_shape=shape_under(job.checkpoint.directory),
        profile=job.profile,
        look_ahead=job.values.look_ahead,
    )


def _generate_and_save(
    job: Job, model: OpenModel, draft: OpenDraft | None, *, screen: Screen, stop: StopSignals
) -> tuple[Outcome, Path | None, TwoendsError | None]:
    say_what_runs(job.checkpoint, job.plan, job.choice, model.files, values=job.values, screen=screen)
    if job.saved is not None:
        restore_state(job.saved, model.state)
    generator = Generator(
        model,
        list(job.ids),
        chunk=job.plan.chunk_tokens,
        earlier_ids=job.earlier_ids,
        draft_model=None if draft is None else draft.drafter,
    )
    outcome = generator.run(
        num_new=job.values.n,
        sampling=job.sampling,
        stream=_stream(job),
        progress=RunProgress(screen, model, num_new=job.values.n),
        stop_asked=lambda: stop.asked,
    )
    path, trouble = _save(job, generator, model, outcome)
    if trouble is None and job.values.save_profile is not None:
        trouble = _save_profile(job.values.save_profile, model)
    return outcome, path, trouble


def _stream(job: Job) -> TextStream:
    if job.tokenizer is not None:
        return TextStream(job.tokenizer, stop_strings=job.values.stop, stop_ids=job.tokenizer.stop_ids)
    eos_id = job.checkpoint.config.eos_id
    stop_ids = set() if eos_id is None else {eos_id}
    return TextStream(stand_in_tokenizer(), stop_strings=(), stop_ids=stop_ids)


def _save(
    job: Job, generator: Generator, model: OpenModel, outcome: Outcome
) -> tuple[Path | None, TwoendsError | None]:
    """Where the session was saved, or what kept it from being: the card comes first either way."""
    path = job.values.save
    if path is None and outcome.finish == "interrupted":
        key = f"{job.checkpoint.index.fingerprint} {generator.ids}".encode()
        path = Path(f"./twoends-{hashlib.blake2b(key, digest_size=4).hexdigest()}.session")
    if path is None:
        return None, None
    try:
        save_session(path, checkpoint=job.checkpoint, ids=generator.ids, state=model.state)
    except TwoendsError as error:
        return None, error
    return path, None


def _save_profile(path: Path, model: OpenModel) -> TwoendsError | None:
    try:
        write_profile(path, model.profile)
    except TwoendsError as error:
        return error
    return None


def _profile(values: Values, checkpoint: Checkpoint) -> ExpertProfile | None:
    """--profile, of this very model; refused where the policy could not use or keep one."""
    if (values.profile or values.save_profile) and values.policy != "decayed":
        flag = "--profile" if values.profile else "--save-profile"
        raise OptionError(
            f"{flag} is of no use with --policy {values.policy}.", remedies=["Leave one of the two out."]
        )
    return load.profile(values.profile, checkpoint)


def _raise_what_went_wrong(report: RunReport, values: Values, trouble: TwoendsError | None) -> None:
    if trouble is not None:
        raise trouble
    if report.peak_bytes > report.plan.ram_bytes:
        raise NotSound(
            f"this run took {format_bytes(report.peak_bytes)}; --ram promised "
            f"{format_bytes(report.plan.ram_bytes)} at most. This is a defect in twoends.",
            evidence=[("planned", format_bytes(report.plan.total_bytes))],
            remedies=["The ids are right. Report this with the output of:  twoends run ... --json"],
        )
    if report.outcome.finish == "interrupted":
        num_done = len(report.outcome.ids)
        raise TwoendsError(
            f"stopped after {num_done:,} of {values.n:,} tokens; the session is saved.",
            remedies=[f"Go on:  {_how_to_go_on(report, values)}"],
        )


def _aborted(values: Values) -> TwoendsError:
    """A second signal: the pass was not finished, so there is no state to keep."""
    earlier = [path for path in (values.load, values.save) if path is not None and path.exists()]
    return TwoendsError(
        "stopped at once; no session was saved.",
        remedies=[f"{path} is as it was before this run." for path in dict.fromkeys(earlier)],
    )


def _how_to_go_on(report: RunReport, values: Values) -> str:
    words = ["twoends", "run", str(report.model), "--load", str(report.session)]
    words += ["-n", str(values.n - len(report.outcome.ids))]
    for key, given in values.given.items():
        if key in _NOT_REPEATED:
            continue
        flag = f"--{key.replace('_', '-')}"
        words += [part for word in given for part in (flag, word)] if given else [flag]
    return shlex.join(words)


def _prompt_ids(ids: list[int] | None, prompt: str | None, tokenizer: Tokenizer | None) -> list[int]:
    if ids is not None:
        return ids
    if prompt is None:
        return []
    text = sys.stdin.read() if prompt == "-" else prompt
    assert tokenizer is not None
    return tokenizer.encode(text)


def _check_ids(ids: list[int], checkpoint: Checkpoint) -> None:
    vocab = checkpoint.config.vocab_size
    if not ids:
        raise OptionError(
            "there is nothing to continue.",
            remedies=[
                'Give a prompt:     twoends run MODEL "Once upon a time"',
                "Or token ids:      twoends run MODEL --ids 1,2,3",
                "Or a session:      twoends run MODEL --load FILE",
            ],
        )
    wrong = [i for i in ids if i >= vocab]
    if wrong:
        raise OptionError(
            f"token id {wrong[0]:,} is outside the vocabulary.",
            evidence=[("expected", f"0 to {vocab - 1:,}"), ("found", f"{wrong[0]:,}")],
        )


def _context(values: Values, needed: int) -> int:
    if values.context is None:
        return needed
    if values.context < needed:
        raise OptionError(
            f"--context is {values.context:,}; this run needs {needed:,} tokens.",
            evidence=[("to continue", f"{needed - values.n:,}"), ("to make", f"{values.n:,}")],
            remedies=["Raise --context, or lower -n."],
        )
    return int(values.context)


def open_trace(path: Path | None) -> Trace:
    """The trace of a run; without a path it writes nothing. Raises OptionError."""
    try:
        return Trace(path)
    except OSError as error:
        raise OptionError(f"--trace: {path} can't be written: {error.strerror}.") from None
