"""How memory above the floor is split between the window, pinned trunk, expert slots and guesses.

A pinned byte saves one byte in every pass. A slot saves what the curve of hits says it does: at most
one read of one expert a token, which is less than its own bytes. So the trunk comes first, unless a
curve says that slots are worth more.
"""

from __future__ import annotations

from dataclasses import dataclass

from twoends.checkpoint.config import ModelConfig
from twoends.checkpoint.index import CheckpointIndex
from twoends.engine.arena import PAGE, align_up
from twoends.engine.curve import HitCurve
from twoends.engine.expert_places import expert_read_bytes
from twoends.engine.layout import Entry, decoded_vectors, pass_bytes, trunk_entries
from twoends.engine.lookahead import MOST_ROOMS, LookAheadMode, look_ahead_bytes
from twoends.engine.window import choose_pins, guessing_bytes, pinned_first, small_bytes
from twoends.units import format_bytes

MIN_SLOTS = 4
MIN_PANEL_BYTES = 64 * 1024
_MAX_PANEL_BYTES = 8 * 2**20
_WIDE_WINDOW_BYTES = 96 * 2**20
_WHOLE_MATRIX_BYTES = 1 << 62
# Where so many times the experts' bytes stream beside them, the disk has no time for guesses.
_BUSY_DISK = 2
# Small tensors are hundreds of reads a pass and few bytes; they stay where they take no more than this part.
_SMALL_SHARE = 4


@dataclass(slots=True, kw_only=True)
class Shares:
    """The split. `rooms` are for guesses, `guess_bytes` what guessing keeps; `look_ahead` says why.

    `fills`: every expert has a slot, and may be read before it is asked for.
    """

    window: int
    panel: int
    pin_budget: int
    pinned: int
    decoded: int
    slots: int
    entries: tuple[Entry, ...]
    rooms: int = 0
    guess_bytes: int = 0
    look_ahead: str = "off"
    fills: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Splitter:
    """Splits what is left for one model. `slot` is the memory of a slot, 0 in a model without experts."""

    config: ModelConfig
    index: CheckpointIndex
    slot: int
    curve: HitCurve
    look_ahead: LookAheadMode

    def split(self, left: int, *, floor_window: int) -> Shares:
        """Trunk first, whole if it fits; else slots for one choice, a wider window, pinned panels."""
        left = left // PAGE * PAGE
        whole = trunk_entries(self.config, self.index, panel_bytes=_WHOLE_MATRIX_BYTES)
        size = align_up(pass_bytes(whole) + sum(decoded_vectors(whole)))
        # Without room for one layer's choice, reads of experts can't go on side by side.
        choice = max(self.config.experts_per_token, self._slots_before_trunk())
        if left + floor_window >= size + align_up(choice * self.slot):
            shares = self._whole(whole)
            left -= size - floor_window
            rooms_left = left - align_up(choice * self.slot)
        else:
            shares, left = self._streamed(left, floor_window=floor_window)
            rooms_left = 0
        left -= self._make_rooms(shares, rooms_left)
        if self.slot:
            shares.slots += min(left // self.slot, self._all_slots - shares.slots)
        return shares

    @property
    def _all_slots(self) -> int:
        return len(self.config.moe_layers) * self.config.num_experts

    def _slots_before_trunk(self) -> int:
        """Slots that save more bytes a token than as many bytes of pinned trunk."""
        if not self.slot:
            return 0
        requests = len(self.config.moe_layers) * self.config.experts_per_token
        saved = requests * expert_read_bytes(self.index)
        return self.curve.slots_worth(self.slot / saved)

    def _whole(self, entries: tuple[Entry, ...]) -> Shares:
        return Shares(
            window=0,
            panel=_WHOLE_MATRIX_BYTES,
            pin_budget=pass_bytes(entries),
            pinned=pass_bytes(entries),
            decoded=sum(decoded_vectors(entries)),
            slots=MIN_SLOTS if self.slot else 0,
            entries=entries,
        )

    def _streamed(self, left: int, *, floor_window: int) -> tuple[Shares, int]:
        slots = 0
        if self.slot:
            wanted = max(self._slots_before_trunk() - MIN_SLOTS, self.config.experts_per_token)
            extra = min(left // (2 * self.slot), wanted)
            slots, left = MIN_SLOTS + extra, left - align_up(extra * self.slot)
        wider = max(min(left // 8, _WIDE_WINDOW_BYTES - floor_window), 0) // PAGE * PAGE
        window, left = floor_window + wider, left - wider
        panel = min(max(window // 8, MIN_PANEL_BYTES), _MAX_PANEL_BYTES)
        entries = trunk_entries(self.config, self.index, panel_bytes=panel)
        shares = Shares(
            window=window, panel=panel, pin_budget=0, pinned=0, decoded=0, slots=slots, entries=entries
        )
        small = align_up(sum(decoded_vectors(entries)))
        if left >= _SMALL_SHARE * (small + small_bytes(entries)):
            shares.decoded, left = small, left - small
        self._pin(shares, left)
        return shares, left - shares.pinned

    def _pin(self, shares: Shares, left: int) -> None:
        # Short of everything: a pass without a streamed panel would have no window to come through.
        shares.pin_budget = min(left, pass_bytes(shares.entries) - PAGE) // PAGE * PAGE
        first = pinned_first(small=bool(shares.decoded), guessing=bool(shares.rooms))
        shares.pinned = choose_pins(shares.entries, shares.pin_budget, first=first)[1]

    def _make_rooms(self, shares: Shares, left: int) -> int:
        """Rooms for guesses, where they can pay; gives the bytes that they take of what is left."""
        rooms = min(MOST_ROOMS, self.config.experts_per_token)
        kept = align_up(look_ahead_bytes(self.config))
        cost = align_up(rooms * self.slot) + kept
        routers = guessing_bytes(shares.entries)
        room = shares.pin_budget - routers if shares.window else left
        streamed = pass_bytes(shares.entries) - shares.pinned
        experts = len(self.config.moe_layers) * self.config.experts_per_token * self.slot
        reason = ""
        if self.look_ahead == "off":
            reason = "off"
        elif not self.slot or shares.slots + (left // self.slot) >= self._all_slots:
            shares.fills = bool(self.slot)
            reason = f"{self.look_ahead}: every expert has room, and is read before it is asked for"
        elif room < cost:
            reason = f"off: no room for routers ({format_bytes(routers)}) and guesses ({format_bytes(cost)})"
        elif self.look_ahead == "auto" and streamed > _BUSY_DISK * experts:
            reason = f"off: {format_bytes(streamed)} of trunk a token leave the disk no time for guesses"
        if reason:
            shares.look_ahead = reason
            return 0
        shares.rooms, shares.guess_bytes = rooms, kept
        shares.look_ahead = f"{self.look_ahead}: {rooms} rooms for guesses"
        if not shares.window:
            return cost
        before = shares.pinned
        self._pin(shares, shares.pin_budget - cost)
        return cost + shares.pinned - before
