"""Budget -> Plan: what is pinned, how wide the window is, how many slots. Refuses below the floor.

`--ram` is the whole process. The plan counts, from the top: what the program already holds
(measured), what one sequence must carry, the activations of a pass, the window, the slots. What
is left buys reads back (engine/split.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from twoends.checkpoint.config import ModelConfig
from twoends.checkpoint.index import CheckpointIndex
from twoends.engine.arena import PAGE, align_up
from twoends.engine.curve import HitCurve, assumed_curve
from twoends.engine.expert_places import expert_read_bytes, slot_bytes
from twoends.engine.layout import (
    Entry,
    decoded_vectors,
    largest_panel,
    pass_bytes,
    trunk_entries,
    unpacking_bytes,
)
from twoends.engine.lookahead import LookAheadMode
from twoends.engine.split import MIN_PANEL_BYTES, MIN_SLOTS, Shares, Splitter
from twoends.engine.store import embedding_bytes
from twoends.errors import DoesNotFit
from twoends.kernels.cores import allowed_cores
from twoends.model.attnres import num_sources
from twoends.model.state import cache_bytes_per_token, recurrent_bytes
from twoends.model.tentative import tentative_bytes
from twoends.units import format_bytes

MAX_CHUNK = 64
# Python's heap while running: text, small arrays, reader threads' stacks, the allocator's slack.
PROGRAM_SLACK_BYTES = 12_000_000
_FLOOR_WINDOW_BYTES = 32 * 2**20
_NARROWER_FOR_MANY = 4
# Python objects of one filled slot: its matrices, views and reads.
_SLOT_BOOKS_BYTES = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the sum: what, how many bytes, and why it can't be less."""

    name: str
    num_bytes: int
    remark: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How a budget is used. All sizes in bytes; `rows` sum to `total_bytes` <= `ram_bytes`.

    `pin_budget_bytes` is what pins were chosen from; whole panels of it are `pinned_bytes`;
    small tensors that stay take `decoded_bytes` more. A pass has
    `chunk_tokens` rows at most, of `num_sequences` sequences of `context_tokens` each.
    `expected_hits` is the share of requests that should find their expert here, by `hits_source`;
    `guess_rooms` experts may be read on a guess, or none, for the reason in `look_ahead`; with
    `fills_slots` all are read early, for all have slots.
    """

    ram_bytes: int
    context_tokens: int
    chunk_tokens: int
    draft_tokens: int
    num_sequences: int
    panel_bytes: int
    window_bytes: int
    pin_budget_bytes: int
    pinned_bytes: int
    decoded_bytes: int
    num_slots: int
    slot_bytes: int
    rows: tuple[Row, ...]
    floor_rows: tuple[Row, ...]
    trunk_bytes_per_pass: int
    expert_bytes_per_request: float
    experts_per_pass: int
    experts_in_all: int
    expected_hits: float
    hits_source: str
    guess_rooms: int
    look_ahead: str
    fills_slots: bool
    embedding_bytes_per_token: int

    @property
    def total_bytes(self) -> int:
        """What the process will hold."""
        return sum(row.num_bytes for row in self.rows)

    @property
    def floor_bytes(self) -> int:
        """The least budget that runs this model at this context."""
        return sum(row.num_bytes for row in self.floor_rows)

    @property
    def streamed_bytes_per_pass(self) -> int:
        """Trunk bytes read in every pass after the first."""
        return self.trunk_bytes_per_pass - self.pinned_bytes

    @property
    def expert_bytes_per_token(self) -> int:
        """Expert bytes of one token when no expert is already here."""
        return round(self.expert_bytes_per_request * self.experts_per_pass)

    @property
    def expected_bytes_per_token(self) -> int:
        """All bytes of one decoded token with the expected share of hits."""
        return self.bytes_per_token - round(self.expected_hits * self.expert_bytes_per_token)

    @property
    def bytes_per_token(self) -> int:
        """All bytes of one decoded token (one of each sequence a pass) when no expert is already here."""
        shared = self.streamed_bytes_per_pass + self.expert_bytes_per_pass
        return round(shared / self.num_sequences) + self.embedding_bytes_per_token

    @property
    def expert_bytes_per_pass(self) -> int:
        """Expert bytes of a pass with one token of each sequence, when no expert is already here."""
        return self.expert_bytes_of(self.num_sequences)

    def expert_bytes_of(self, rows: float) -> int:
        """Expert bytes of a pass of so many rows, when no expert is already here.

        Texts that have nothing to do with each other meet in an expert by chance: of E experts a layer,
        N rows that choose S each want E (1 - (1 - S/E)^N).
        """
        if not self.experts_per_pass:
            return 0
        left_out: float = (1 - self.experts_per_pass / self.experts_in_all) ** rows
        return round(self.expert_bytes_per_request * self.experts_in_all * (1 - left_out))


def make_plan(
    config: ModelConfig,
    index: CheckpointIndex,
    *,
    ram_bytes: int,
    program_bytes: int,
    context_tokens: int,
    chunk_tokens: int | None,
    backend_bytes: int = 0,
    draft_tokens: int = 0,
    num_sequences: int = 1,
    more_rows: tuple[Row, ...] = (),
    curve: HitCurve | None = None,  # hits as measured of this model; None: as assumed of any
    look_ahead: LookAheadMode = "off",
) -> Plan:
    """The plan for `num_sequences` sequences of `context_tokens`. Raises DoesNotFit below the floor.

    `program_bytes` was measured before any weight is read; kernels at work hold `backend_bytes`, the caller
    `more_rows`. A chunk (None: the plan chooses) has a row for each sequence, none beyond their contexts.
    """
    most_rows = num_sequences * context_tokens
    chunk_tokens = None if chunk_tokens is None else min(chunk_tokens, most_rows)
    fixed = (
        _program_row(program_bytes, backend_bytes),
        *_sequence_rows(config, num_sequences, context_tokens),
        *_reading_rows(index),
        *_draft_rows(config, draft_tokens),
        *more_rows,
    )
    limits = (most_rows, chunk_tokens, draft_tokens)
    base = _lay_base(config, index, fixed, ram_bytes=ram_bytes, num_sequences=num_sequences, limits=limits)
    hits = curve or assumed_curve(cycle_slots=_cycle(config), all_slots=_experts_in_all(config))
    splitter = Splitter(config=config, index=index, slot=base.slot, curve=hits, look_ahead=look_ahead)
    shares = splitter.split(base.left, floor_window=base.floor_window)
    return Plan(
        ram_bytes=ram_bytes,
        context_tokens=context_tokens,
        chunk_tokens=max(base.chunk, num_sequences),
        draft_tokens=draft_tokens,
        num_sequences=num_sequences,
        panel_bytes=shares.panel,
        window_bytes=shares.window,
        pin_budget_bytes=shares.pin_budget,
        pinned_bytes=shares.pinned,
        decoded_bytes=shares.decoded,
        num_slots=shares.slots,
        slot_bytes=base.slot,
        rows=(*fixed, base.scratch, *_rows_of(shares, slot=base.slot, num_experts=_experts_in_all(config))),
        floor_rows=base.floor_rows,
        trunk_bytes_per_pass=pass_bytes(shares.entries),
        expert_bytes_per_request=expert_read_bytes(index) if base.slot else 0.0,
        experts_per_pass=_cycle(config),
        experts_in_all=_experts_in_all(config),
        expected_hits=hits.share(shares.slots),
        hits_source=hits.source,
        guess_rooms=shares.rooms,
        look_ahead=shares.look_ahead,
        fills_slots=shares.fills,
        embedding_bytes_per_token=_embedding_read_bytes(index),
    )


def _cycle(config: ModelConfig) -> int:
    """Experts that one token asks for in all layers."""
    return len(config.moe_layers) * config.experts_per_token


def _experts_in_all(config: ModelConfig) -> int:
    return len(config.moe_layers) * config.num_experts


@dataclass(frozen=True, slots=True, kw_only=True)
class _Base:
    """What must be, and the `left` bytes that are split."""

    slot: int
    floor_window: int
    floor_rows: tuple[Row, ...]
    chunk: int
    scratch: Row
    left: int


def _lay_base(
    config: ModelConfig,
    index: CheckpointIndex,
    fixed: tuple[Row, ...],
    *,
    ram_bytes: int,
    num_sequences: int,
    limits: tuple[int, int | None, int],
) -> _Base:
    """`limits` are the rows that contexts have room for, those of a chunk, the tokens of a draft."""
    most_rows, chunk_tokens, draft_tokens = limits
    narrow = trunk_entries(config, index, panel_bytes=MIN_PANEL_BYTES)
    floor_window = _floor_window(narrow, num_sequences)
    slot = slot_bytes(index) + _SLOT_BOOKS_BYTES if len(config.moe_layers) else 0
    streams = _floor_streams(floor_window, slot)
    fewest = max(chunk_tokens or 1, draft_tokens + 1, num_sequences)
    decoded = max(decoded_vectors(narrow))
    floor_rows = (*fixed, _scratch_row(config, fewest, decoded), *streams)
    floor = sum(row.num_bytes for row in floor_rows)
    if ram_bytes < floor:
        raise below_floor(ram_bytes, floor_rows, num_sequences=num_sequences)
    chunk = chunk_tokens or _choose_chunk(config, (ram_bytes - floor) // 4, most_rows)
    scratch = _scratch_row(config, max(chunk, fewest), decoded)
    left = ram_bytes - sum(row.num_bytes for row in (*fixed, scratch, *streams))
    return _Base(
        slot=slot,
        floor_window=floor_window,
        floor_rows=floor_rows,
        chunk=chunk,
        scratch=scratch,
        left=left,
    )


def _embedding_read_bytes(index: CheckpointIndex) -> int:
    embed = index.tensor(None, "embed")
    return align_up(embed.segment.nbytes // embed.shape[0]) + PAGE


def _floor_window(narrow: tuple[Entry, ...], num_sequences: int) -> int:
    """The least window: four panels must be on their way, and more so that few reads are waited for.

    Where sequences share a pass, the state of one more saves more than a window that is twice as wide.
    """
    share = 1 if num_sequences == 1 else _NARROWER_FOR_MANY
    enough = min(_FLOOR_WINDOW_BYTES, pass_bytes(narrow) // 16) // share
    return align_up(max(4 * largest_panel(narrow), enough))


def _floor_streams(window: int, slot: int) -> tuple[Row, Row]:
    """The least that weights need on their way through."""
    num_slots = MIN_SLOTS if slot else 0
    return (
        Row(name="trunk window", num_bytes=window, remark="panels on their way"),
        Row(name=f"{num_slots} expert slots", num_bytes=align_up(slot * num_slots), remark="the least"),
    )


def _rows_of(shares: Shares, *, slot: int, num_experts: int) -> tuple[Row, ...]:
    rows = []
    if shares.pinned:
        rows.append(
            Row(name="pinned trunk", num_bytes=align_up(shares.pinned + shares.decoded), remark="stays")
        )
    if shares.window:
        panels = f"panels of {format_bytes(min(shares.panel, shares.window))}"
        rows.append(Row(name="trunk window", num_bytes=shares.window, remark=panels))
    if shares.slots:
        size = align_up(shares.slots * slot)
        rows.append(
            Row(name=f"{shares.slots} expert slots", num_bytes=size, remark=f"of {num_experts:,} experts")
        )
    if shares.rooms:
        size = align_up(shares.rooms * slot) + shares.guess_bytes
        rows.append(Row(name="look-ahead", num_bytes=size, remark=f"{shares.rooms} experts on a guess"))
    return tuple(rows)


def below_floor(ram_bytes: int, floor_rows: tuple[Row, ...], *, num_sequences: int = 1) -> DoesNotFit:
    """The refusal, with the sum that can be checked."""
    floor = sum(row.num_bytes for row in floor_rows)
    fewer = [f"Or fewer sequences:   --sequences below {num_sequences}"] if num_sequences > 1 else []
    return DoesNotFit(
        f"this model needs at least {format_bytes(floor)} to run; the budget is {format_bytes(ram_bytes)}.",
        evidence=[(row.name, format_bytes(row.num_bytes), row.remark) for row in floor_rows if row.num_bytes],
        remedies=[
            f"Raise the budget:     twoends run MODEL --ram {_round_up(floor)}",
            *fewer,
            "See every step up:    twoends plan MODEL",
        ],
    )


def _round_up(num_bytes: int) -> str:
    megabytes = -(-num_bytes // 10_000_000) * 10
    return f"{megabytes}MB" if megabytes < 10_000 else f"{-(-megabytes // 1000)}GB"


def _program_row(program_bytes: int, backend_bytes: int) -> Row:
    spare = PROGRAM_SLACK_BYTES + backend_bytes
    program = program_bytes + spare
    return Row(name="program", num_bytes=align_up(program), remark=f"measured; {spare / 1e6:.0f} MB to spare")


def _reading_rows(index: CheckpointIndex) -> tuple[Row, ...]:
    unpacking = unpacking_bytes(index, threads=allowed_cores()[0])
    embedding = Row(
        name="embedding rows", num_bytes=align_up(embedding_bytes(index)), remark="read one by one"
    )
    if not unpacking:
        return (embedding,)
    return (embedding, Row(name="unpacking", num_bytes=align_up(unpacking), remark="packed rows at work"))


def _sequence_rows(config: ModelConfig, count: int, context_tokens: int) -> tuple[Row, ...]:
    """What every sequence carries, and what they need where they share a pass: logits of each at once."""
    per_token = cache_bytes_per_token(config)
    kda_layers = config.num_layers - len(config.mla_layers)
    who = "one sequence" if count == 1 else f"{count} sequences"
    times = "" if count == 1 else f"{count} x "
    rows = (
        Row(
            name="recurrent state",
            num_bytes=align_up(count * recurrent_bytes(config)),
            remark=f"{kda_layers} KDA layers, {who}",
        ),
        Row(
            name="latent cache",
            num_bytes=align_up(count * per_token * context_tokens),
            remark=f"{times}{context_tokens:,} tokens of {per_token:,} B",
        ),
    )
    if count == 1:
        return rows
    # The rows that are asked for are gathered, normalised and split beside their logits.
    logits = 4 * (count - 1) * (config.vocab_size + 3 * config.hidden_size)
    return (*rows, Row(name="logits", num_bytes=align_up(logits), remark=f"of {who} at once"))


def _draft_rows(config: ModelConfig, draft_tokens: int) -> tuple[Row, ...]:
    if not draft_tokens:
        return ()
    rows = draft_tokens + 1
    size = tentative_bytes(config, rows) + 4 * rows * config.vocab_size
    return (Row(name="drafts", num_bytes=align_up(size), remark=f"up to {draft_tokens} verified at once"),)


def scratch_bytes(config: ModelConfig, chunk: int) -> int:
    """Activations of a pass of `chunk` rows: the residual's sources and the widest half layer."""
    c = config
    kda = 13 * c.kda_width
    mla = c.num_heads * (c.query_dim + 4 * c.value_dim) + 2 * c.latent_row
    dense = 3 * c.dense_width
    chosen = c.experts_per_token * c.expert_input
    moe = chosen + 3 * max(c.shared_width, c.expert_width) + 4 * c.expert_input + 4 * c.num_experts
    per_row = (num_sources(c) + 6) * c.hidden_size + max(kda, mla, dense, moe)
    # A product keeps its input split in two beside it; logits are one row, with copies to sample; experts are
    # multiplied several at once while they have no more rows than one choice (kernels/native/products.cpp).
    one_choice = c.experts_per_token * (3 * c.expert_width + 3 * c.expert_input)
    return 4 * (chunk * (per_row + max(c.dense_width, c.kda_width)) + one_choice + 6 * c.vocab_size)


def _scratch_row(config: ModelConfig, chunk: int, decoded: int) -> Row:
    return Row(
        name="activations",
        num_bytes=align_up(scratch_bytes(config, chunk) + decoded),
        remark="one token at a time" if chunk == 1 else f"{chunk} tokens at a time",
    )


def _choose_chunk(config: ModelConfig, room: int, most_rows: int) -> int:
    chunk = min(MAX_CHUNK, most_rows)
    while chunk > 1 and scratch_bytes(config, chunk) > room:
        chunk //= 2
    return chunk
