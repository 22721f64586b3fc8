"""OpenModel: a checkpoint opened within a budget, ready to run passes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from twoends.checkpoint.config import ModelConfig, read_config
from twoends.checkpoint.index import CheckpointIndex
from twoends.checkpoint.pack_file import is_pack
from twoends.checkpoint.pack_index import open_pack
from twoends.engine.budget import Plan, Row, make_plan
from twoends.engine.curve import HitCurve
from twoends.engine.experts import ExpertSlots
from twoends.engine.files import ReadAt, WeightFiles, read_at
from twoends.engine.forward import LayerDone, Observe, forward
from twoends.engine.layout import Entry, trunk_entries
from twoends.engine.lookahead import LookAhead, LookAheadMode
from twoends.engine.memory import counted_bytes, hard_limit_bytes
from twoends.engine.policies import Decayed, Policy, make_policy
from twoends.engine.profile import ExpertProfile
from twoends.engine.reader import Reader, ReadShape
from twoends.engine.recall import Recall
from twoends.engine.store import WeightStore
from twoends.engine.trace import Counters, Trace
from twoends.engine.window import Window, pinned_first
from twoends.errors import DoesNotFit, OptionError
from twoends.kernels.ops import F32, I32, Activations, Ops
from twoends.model.attnres import Residual
from twoends.model.rows import SequenceRows
from twoends.model.state import SequenceState
from twoends.model.tentative import Tentative
from twoends.units import format_bytes

# numpy temporaries of the reference kernels: values and binary64 sums of a block of rows.
REFERENCE_BACKEND_BYTES = 64_000_000

# Told of every pass of one sequence: the position of its first id, its ids, and what forward.Observe gets.
Watch = Callable[[int, list[int], F32, Residual, F32], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint whose headers were read and found right; no weight was read yet."""

    directory: Path
    config: ModelConfig
    index: CheckpointIndex

    @classmethod
    def open(
        cls,
        directory: Path,
        *,
        latent_eps: float | None = None,
        expert_activations: Activations = "f32",
        source: Path | None = None,
    ) -> Checkpoint:
        """A checkpoint or a pack of one; `source` says where the checkpoint of a pack is now.

        Raises ConfigError and CheckpointError for anything that is not as it should be, OptionError
        for MXFP8 activations where the experts are not MXFP4: nobody trains such a pair.
        """
        released = config = read_config(directory)
        if latent_eps is not None:
            config = config.with_latent_eps(latent_eps)
        config = config.with_expert_activations(expert_activations)
        if is_pack(directory):
            other = None if config == released else config
            index = open_pack(directory, released, source=source, run_config=other)
        elif source is None:
            index = CheckpointIndex.open(directory, config)
        else:
            raise OptionError(
                f"{directory} is no pack, so it has no source.", remedies=["Leave --source out."]
            )
        if expert_activations == "mxfp8" and index.expert_format != "mxfp4":
            raise OptionError(
                f"MXFP8 activations go with MXFP4 experts; {directory.name} has {index.expert_format}.",
                remedies=["Leave --expert-activations out."],
            )
        return cls(directory=directory, config=config, index=index)

    def plan(
        self,
        *,
        ram_bytes: int,
        context_tokens: int,
        chunk_tokens: int | None,
        reference: bool,
        draft_tokens: int = 0,
        num_sequences: int = 1,
        more_rows: tuple[Row, ...] = (),
        curve: HitCurve | None = None,
        look_ahead: LookAheadMode = "off",
    ) -> Plan:
        """The plan of this process for a budget. Raises DoesNotFit below the floor."""
        return make_plan(
            self.config,
            self.index,
            ram_bytes=ram_bytes,
            program_bytes=counted_bytes(),
            context_tokens=context_tokens,
            chunk_tokens=chunk_tokens,
            backend_bytes=REFERENCE_BACKEND_BYTES if reference else 0,
            draft_tokens=draft_tokens,
            num_sequences=num_sequences,
            more_rows=more_rows,
            curve=curve,
            look_ahead=look_ahead,
        )


class OpenModel:
    """Weights within a plan, and the sequences that run on them: as many as the plan has room for."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        plan: Plan,
        ops: Ops,
        *,
        policy: str = "decayed",
        trace: Trace | None = None,
        direct: bool = True,
        read: ReadAt = read_at,
        read_shape: ReadShape | None = None,
        profile: ExpertProfile | None = None,
        look_ahead: LookAheadMode = "auto",
        poison: bool = False,
    ) -> None:
        """Takes all memory of the plan at once. `read` and `poison` are for tests.

        `read_shape` None reads as devices are read that nothing is known of; `profile` gives the
        policy `decayed` what another run of this model learnt; `look_ahead` counts where the plan
        has rooms for guesses: `on` reads all of them, `auto` those that come true often enough.
        Raises DoesNotFit for a plan that this process will not be given, CheckpointError for a
        file that can't be opened.
        """
        _refuse_beyond_limits(plan)
        config, index = checkpoint.config, checkpoint.index
        self.checkpoint, self.plan, self.ops = checkpoint, plan, ops
        self.config = config
        self.counters = Counters()
        self.trace = trace or Trace()
        self.trace.event("model", fingerprint=index.fingerprint, policy=policy, slots=plan.num_slots)
        self.files = WeightFiles(index.paths, direct=direct, read=read)
        self.read_shape = read_shape or ReadShape()
        reader = self._start_reader()
        entries = trunk_entries(config, index, panel_bytes=plan.panel_bytes)
        self._window = _window(plan, entries, reader, poison=poison)
        self._curve = None if profile is None else profile.curve
        self._policy = _policy(policy, plan, config, profile)
        self._slots = ExpertSlots(
            index,
            reader,
            self._policy,
            num_slots=plan.num_slots,
            counters=self.counters,
            trace=self.trace,
            poison=poison,
            num_rooms=plan.guess_rooms,
            recall=_recall(look_ahead, config) if plan.guess_rooms else None,
            fills=plan.fills_slots,
        )
        self.store = WeightStore(
            config, index, entries=entries, window=self._window, slots=self._slots, reader=reader
        )
        self.states = tuple(SequenceState(config, plan.context_tokens) for _ in range(plan.num_sequences))
        self._look_ahead = _look_ahead(config, self.store, self._slots)
        self._watch: Watch | None = None
        self._slots.fill()

    def _start_reader(self) -> Reader:
        return Reader(
            self.files,
            counters=self.counters,
            trace=self.trace,
            depth=self.read_shape.depth,
            piece_bytes=self.read_shape.piece_bytes,
        )

    @property
    def state(self) -> SequenceState:
        """The first sequence's state, where there is only one."""
        return self.states[0]

    @property
    def held_bytes(self) -> int:
        """What the engine holds by its own books: state, window, pinned panels, slots."""
        states = sum(state.num_bytes for state in self.states)
        return states + self._window.num_bytes + self._slots.num_bytes

    @property
    def profile(self) -> ExpertProfile:
        """What the policy `decayed` has learnt of this model's experts."""
        assert isinstance(self._policy, Decayed), "only decayed counts make a profile"
        fingerprint = self.checkpoint.index.fingerprint
        popularity_LE = self._policy.popularity_LE
        return ExpertProfile(fingerprint=fingerprint, popularity_LE=popularity_LE, curve=self._curve)

    def run_pass(self, ids: list[int], *, layer_done: LayerDone, all_rows: bool = False) -> F32:
        """Logits after the last of `ids` (or after each): one pass over the weights, for the first sequence.

        Raises DoesNotFit if the plan's context has no room for them, ReadError, NotSound. After an
        error in a pass the state is not whole: the model can only be closed.
        """
        rows = SequenceRows(state=self.state, first=0, count=len(ids))
        wanted = range(len(ids)) if all_rows else [len(ids) - 1]
        return self._pass(ids, [rows], wanted=wanted, layer_done=layer_done)

    def run_shared(self, parts: Sequence[tuple[int, list[int]]], *, layer_done: LayerDone) -> F32:
        """One pass that carries rows of several sequences: logits [P, W] after the last id of each part.

        A part is (which sequence, its next ids); no sequence may have two. Each weight is read once,
        and each row's logits are those that it has alone. Raises what `run_pass` raises.
        """
        assert len({place for place, _ in parts}) == len(parts), "a sequence has one part"
        sequences: list[SequenceRows] = []
        ids: list[int] = []
        for place, part in parts:
            sequences.append(SequenceRows(state=self.states[place], first=len(ids), count=len(part)))
            ids += part
        wanted = [rows.first + rows.count - 1 for rows in sequences]
        return self._pass(ids, sequences, wanted=wanted, layer_done=layer_done)

    def _pass(
        self,
        ids: list[int],
        sequences: Sequence[SequenceRows],
        *,
        wanted: Sequence[int],
        layer_done: LayerDone,
    ) -> F32:
        assert ids, "a pass carries at least one token"
        assert 0 <= min(ids) <= max(ids) < self.config.vocab_size, "ids lie in the vocabulary"
        for rows in sequences:
            _refuse_beyond_context(rows)
        ids_T: I32 = np.array(ids, np.int32)
        if self.trace.on:
            first = sequences[0].state.position
            self.trace.event("pass", position=first, tokens=len(ids), sequences=len(sequences))
        return forward(
            ids_T,
            sequences,
            config=self.config,
            store=self.store,
            ops=self.ops,
            layer_done=layer_done,
            wanted=wanted,
            look_ahead=self._look_ahead,
            observe=self._watched(ids, sequences),
        )

    def _watched(self, ids: list[int], sequences: Sequence[SequenceRows]) -> Observe | None:
        if self._watch is None:
            return None
        return functools.partial(self._watch, sequences[0].state.position, ids)

    def run_tentative(self, ids: list[int], *, layer_done: LayerDone) -> tuple[F32, Tentative]:
        """Logits after each of `ids`, and the pass itself: `keep(count, ops)` moves the state on by some.

        Raises what `run_pass` raises.
        """
        tentative = Tentative(self.state, len(ids))
        rows = SequenceRows(state=self.state, first=0, count=len(ids), tentative=tentative)
        return self._pass(ids, [rows], wanted=range(len(ids)), layer_done=layer_done), tentative

    def watch(self, watch: Watch) -> None:
        """Lets `watch` see the hidden states of every pass from now on, rows to be taken back included."""
        assert self.plan.num_sequences == 1, "rows of one sequence are watched"
        self._watch = watch

    def expect_passes(self, count: int) -> None:
        """Lets the window read ahead into `count` more passes."""
        self.store.expect_passes(count)

    def close(self) -> None:
        """Ends reads, closes files and the trace."""
        self.store.close()
        self.trace.close()


def _window(plan: Plan, entries: tuple[Entry, ...], reader: Reader, *, poison: bool) -> Window:
    return Window(
        entries,
        reader,
        ring_bytes=plan.window_bytes,
        pinned_bytes=plan.pin_budget_bytes,
        poison=poison,
        pin_first=pinned_first(small=bool(plan.decoded_bytes), guessing=bool(plan.guess_rooms)),
    )


def _look_ahead(config: ModelConfig, store: WeightStore, slots: ExpertSlots) -> LookAhead | None:
    if slots.guesses is None:
        return None
    return LookAhead(config, router=store.router, guesses=slots.guesses)


def _recall(mode: LookAheadMode, config: ModelConfig) -> Recall:
    return Recall(num_layers=len(config.moe_layers), num_ranks=config.experts_per_token, always=mode == "on")


def _policy(name: str, plan: Plan, config: ModelConfig, profile: ExpertProfile | None) -> Policy:
    policy = make_policy(
        name,
        plan.num_slots,
        first_layer=config.num_dense_layers,
        num_layers=len(config.moe_layers),
        num_experts=config.num_experts,
        choice=config.experts_per_token,
    )
    if profile is not None:
        assert isinstance(policy, Decayed), "only decayed counts can begin with a profile"
        policy.warm(profile.popularity_LE)
    return policy


def _refuse_beyond_context(rows: SequenceRows) -> None:
    state = rows.state
    if state.position + rows.count > state.capacity:
        raise DoesNotFit(
            f"the context of {state.capacity:,} tokens is full.",
            evidence=[
                ("gone through", f"{state.position:,} tokens"),
                ("next", f"{rows.count:,} more"),
            ],
            remedies=["Open the model with a larger context."],
        )


def _refuse_beyond_limits(plan: Plan) -> None:
    """A plan that the system will not give would end in the middle, by a signal."""
    limit = hard_limit_bytes()
    if plan.total_bytes > limit:
        raise DoesNotFit(
            f"the plan takes {format_bytes(plan.total_bytes)}; this process may take "
            f"{format_bytes(limit)} at most.",
            evidence=[
                ("budget", format_bytes(plan.ram_bytes)),
                ("limit", "the machine's memory, a cgroup's, or ulimit -d"),
            ],
            remedies=[f"Lower the budget:  --ram {limit // 10**6}MB"],
        )
