"""Routing traces: which experts a model asked for, read from our own traces and from two public forms.

ours          one JSON object per line, with `event` (docs/format.md); `run --trace` writes it
token lines   one JSON object per token: `layers` = expert ids per MoE layer, sorted, so not by rank
sweep pairs   int32 (layer, expert) pairs, per sweep over a growing prefix: layer by layer, token by
              token, 16 experts by rank. Decode order is the first sweep and each later one's last token.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from twoends.errors import OptionError
from twoends.kernels.ops import I32

Order = Literal["decode", "file"]

_SWEEP_EXPERTS = 16
_MAX_ID = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One layer's choice in one pass: ids_TS of T tokens, best first where the trace is ranked."""

    layer: int
    ids_TS: I32


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingTrace:
    """The choices of a run in the order of use. Layers are 0-based; `fingerprint` None: of no known model."""

    form: str
    steps: tuple[Step, ...]
    ranked: bool
    fingerprint: str | None

    @property
    def layers(self) -> range:
        """From the first layer with experts to the last."""
        layers = {step.layer for step in self.steps}
        return range(min(layers), max(layers) + 1)

    @property
    def num_experts(self) -> int:
        """One more than the largest id: what a table of all experts needs."""
        return 1 + max(int(step.ids_TS.max()) for step in self.steps)

    @property
    def cycle_slots(self) -> int:
        """Experts that one token asks for in all layers: one token cycle."""
        first: dict[int, int] = {}
        for step in self.steps:
            first.setdefault(step.layer, step.ids_TS.shape[1])
        return sum(first.values())

    @property
    def num_tokens(self) -> int:
        """Tokens that went through the first of the layers."""
        first = self.layers[0]
        return sum(step.ids_TS.shape[0] for step in self.steps if step.layer == first)

    def requests(self) -> list[tuple[int, int]]:
        """(layer, expert) in the order of use; what several tokens of a pass share is asked for once."""
        return [
            (step.layer, expert)
            for step in self.steps
            for expert in dict.fromkeys(step.ids_TS.ravel().tolist())
        ]

    def first_tokens(self, count: int) -> RoutingTrace:
        """The same trace cut after `count` passes over the first layer."""
        first, seen, kept = self.layers[0], 0, []
        for step in self.steps:
            seen += step.layer == first
            if seen > count:
                break
            kept.append(step)
        return replace(self, steps=tuple(kept))


def read_trace(path: Path, *, order: Order = "decode") -> RoutingTrace:
    """Any of the three forms. `order` matters for sweep pairs only. Raises OptionError."""
    try:
        with path.open("rb") as file:
            is_text = file.read(1) == b"{"
    except OSError as error:
        raise OptionError(f"{path} can't be read: {error.strerror}.") from None
    if not is_text:
        return _sweep_pairs(path, order)
    lines = _json_lines(path)
    try:
        first = next(lines)
    except StopIteration:
        raise _wrong(path, 1, "it has no whole line") from None
    if "event" in first:
        return _our_events(path, first, lines)
    return _token_lines(path, first, lines)


def check_model(trace: RoutingTrace, fingerprint: str, *, path: Path) -> None:
    """Raises OptionError for a trace of another model than the one with this fingerprint."""
    if trace.fingerprint != fingerprint:
        raise OptionError(
            f"{path.name} is not a trace of this model.",
            evidence=[("this model", fingerprint), ("trace", trace.fingerprint or "names no model")],
            remedies=["Make one:  twoends run MODEL PROMPT --trace FILE"],
        )


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Every whole line; the last may be cut, where a disk was full."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                found = json.loads(line)
            except ValueError:
                found = None
            if not isinstance(found, dict):
                raise _wrong(path, number, "it is not a JSON object")
            yield found


def _our_events(path: Path, first: dict[str, Any], rest: Iterator[dict[str, Any]]) -> RoutingTrace:
    if first["event"] != "model" or not isinstance(first.get("fingerprint"), str):
        raise _wrong(path, 1, "a trace begins with the event 'model'")
    steps = []
    for number, event in enumerate(rest, 2):
        if event.get("event") == "model":
            raise _wrong(path, number, "a second run begins here; one trace is one run")
        if event.get("event") == "route":
            steps.append(_step(path, number, event.get("layer"), event.get("ids")))
    return _trace(path, "ours", steps, ranked=True, fingerprint=first["fingerprint"])


def _token_lines(path: Path, first: dict[str, Any], rest: Iterator[dict[str, Any]]) -> RoutingTrace:
    steps = []
    for number, token in enumerate([first, *rest], 1):
        layers = token.get("layers")
        if not isinstance(layers, list) or not layers:
            raise _wrong(path, number, "it has neither an event nor a list of layers")
        steps += [_step(path, number, layer, [ids]) for layer, ids in enumerate(layers, 1)]
    return _trace(path, "token lines", steps, ranked=False, fingerprint=None)


def _step(path: Path, number: int, layer: Any, ids: Any) -> Step:
    try:
        found_TS = np.array(ids)
    except (ValueError, OverflowError):
        # Rows of several lengths.
        found_TS = np.array([])
    if found_TS.dtype.kind != "i" or found_TS.ndim != 2 or not found_TS.size:
        raise _wrong(path, number, "its ids are not lists of whole numbers of one length")
    if not isinstance(layer, int) or not 0 <= layer < _MAX_ID:
        raise _wrong(path, number, "it has no layer")
    if found_TS.min() < 0 or found_TS.max() >= _MAX_ID:
        raise _wrong(path, number, "an expert's id is below zero or beyond any model's")
    return Step(layer=layer, ids_TS=found_TS.astype(np.int32))


def _sweep_pairs(path: Path, order: Order) -> RoutingTrace:
    raw = path.read_bytes()
    if not raw or len(raw) % 8:
        raise OptionError(
            f"{path.name} is no routing trace.",
            evidence=[
                ("expected", "JSON lines, or pairs of 32-bit numbers"),
                ("found", f"{len(raw):,} bytes"),
            ],
        )
    layer_P, expert_P = np.frombuffer(raw, "<i4").reshape(-1, 2).T
    # A run of one layer's pairs is that layer's turn in a sweep.
    starts = np.flatnonzero(np.diff(layer_P, prepend=-1))
    ends = np.append(starts[1:], layer_P.size)
    if (
        ((ends - starts) % _SWEEP_EXPERTS).any()
        or layer_P.min() < 0
        or expert_P.min() < 0
        or expert_P.max() >= _MAX_ID
    ):
        raise OptionError(
            f"{path.name} is no routing trace.",
            evidence=[("expected", f"layers in turns of {_SWEEP_EXPERTS} (layer, expert) pairs a token")],
        )
    turns = [
        (int(layer_P[a]), expert_P[a:b].reshape(-1, _SWEEP_EXPERTS).astype(np.int32))
        for a, b in zip(starts, ends, strict=True)
    ]
    return _trace(path, "sweep pairs", _in_order(turns, order), ranked=True, fingerprint=None)


def _in_order(turns: list[tuple[int, I32]], order: Order) -> list[Step]:
    """One step per token: in the order of the file, or as a decoder that keeps its state would ask."""
    if order == "file":
        return [Step(layer=layer, ids_TS=row[None]) for layer, ids_TS in turns for row in ids_TS]
    sweeps: list[list[tuple[int, I32]]] = []
    for layer, ids_TS in turns:
        if not sweeps or layer <= sweeps[-1][-1][0]:
            sweeps.append([])
        sweeps[-1].append((layer, ids_TS))
    steps = []
    for number, sweep in enumerate(sweeps):
        tokens = range(sweep[0][1].shape[0]) if number == 0 else (-1,)
        steps += [Step(layer=layer, ids_TS=ids_TS[t][None]) for t in tokens for layer, ids_TS in sweep]
    return steps


def _trace(
    path: Path, form: str, steps: list[Step], *, ranked: bool, fingerprint: str | None
) -> RoutingTrace:
    if not steps:
        raise OptionError(f"{path.name} has no routing in it: no layer chose an expert.")
    return RoutingTrace(form=form, steps=tuple(steps), ranked=ranked, fingerprint=fingerprint)


def _wrong(path: Path, number: int, reason: str) -> OptionError:
    return OptionError(f"{path.name} is no routing trace: {reason}.", evidence=[("line", f"{number:,}")])
