"""Which experts several tokens share: by formula for independent ones, by a measured curve for one text.

E experts a layer, S chosen by a token. n independent tokens choose U(n) = E (1 - (1 - S/E)^n) different
ones. Adjacent tokens of one text agree more: their curve is measured, and exists for released models.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from twoends.checkpoint.config import ModelConfig
from twoends.errors import OptionError
from twoends.sizing.models import SizedModel
from twoends.sizing.tables import Entry, asset, check_keys, entries, read_toml

FORMULA = "U(n) = E (1 - (1 - S/E)^n), independent tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingCurve:
    """What a trace of one model says: distinct experts of a layer, and hits of the engine's cache."""

    rows: tuple[float, ...]
    distinct: tuple[float, ...]
    cycles: tuple[float, ...]
    hits: tuple[float, ...]
    source: str

    @property
    def most_rows(self) -> int:
        """The longest run of tokens that was measured."""
        return int(self.rows[-1])

    def distinct_at(self, rows: float) -> float:
        """Different experts of a layer that so many adjacent tokens choose."""
        return _between(self.rows, self.distinct, rows)

    def hit_share(self, cycles: float, *, all_cycles: float) -> float:
        """Share of requests that are answered by a cache of that many token cycles.

        Beyond the last measured capacity a straight line to `all_cycles`, which hold every expert.
        """
        if all_cycles <= self.cycles[-1]:
            return _between((0.0, *self.cycles), (0.0, *self.hits), cycles)
        return _between((0.0, *self.cycles, all_cycles), (0.0, *self.hits, 1.0), cycles)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """What one pass carries: `sequences` independent ones, each with `drafts` guessed tokens behind its own.

    `acceptance` is the chance that a draft is right, given that all before it were.
    """

    sequences: int = 1
    drafts: int = 0
    acceptance: float = 0.0

    @property
    def rows(self) -> int:
        """Tokens that go through the weights."""
        return self.sequences * (self.drafts + 1)

    @property
    def tokens_per_pass(self) -> float:
        """Tokens that a pass is expected to give: 1 + a + ... + a^k for each sequence."""
        return self.sequences * sum(self.acceptance**i for i in range(self.drafts + 1))


def uniform_distinct(config: ModelConfig, tokens: float) -> float:
    """Different experts of one layer that so many independent tokens choose."""
    experts, chosen = config.num_experts, config.experts_per_token
    return experts * (1.0 - float((1 - chosen / experts) ** tokens))


def distinct_experts(config: ModelConfig, rows: Rows, curve: RoutingCurve | None) -> float:
    """Different experts of one layer that a pass needs.

    One text's adjacent tokens follow the measured curve (the formula where there is none), sequences are
    independent of each other. Raises OptionError for more drafts than were measured.
    """
    own = rows.drafts + 1
    if curve is None:
        return uniform_distinct(config, rows.rows)
    if own > curve.most_rows:
        raise OptionError(
            f"--draft {rows.drafts} needs a curve of {own} tokens; it was measured up to {curve.most_rows}.",
            evidence=[("curve", curve.source)],
        )
    share = curve.distinct_at(own) / config.num_experts
    return config.num_experts * (1 - (1 - share) ** rows.sequences)


def curve_of(model: SizedModel) -> RoutingCurve | None:
    """The measured curve of a released model; None for any other."""
    release = model.release
    return None if release is None else _curves().get(release)


def curve_name(curve: RoutingCurve | None, rows: Rows) -> str:
    """How the number of different experts was found, in words."""
    if curve is None:
        return FORMULA
    parts = []
    if rows.drafts:
        parts.append(f"one text's {rows.drafts + 1} tokens: measured, {curve.source}")
    if rows.sequences > 1 or not rows.drafts:
        parts.append(FORMULA)
    return "; ".join(parts)


def _curves() -> dict[str, RoutingCurve]:
    path = asset("routing.toml")
    tables = read_toml(path)
    check_keys(tables, ("curve",), path=path)
    return dict(_curve(entry) for entry in entries(tables, "curve", path=path))


def _curve(entry: Entry) -> tuple[str, RoutingCurve]:
    entry.text("kind")
    curve = RoutingCurve(
        rows=entry.numbers("rows"),
        distinct=entry.numbers("distinct"),
        cycles=entry.numbers("cycles"),
        hits=entry.numbers("hits"),
        source=entry.origin(),
    )
    model = entry.text("model")
    entry.done()
    return model, curve


def _between(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """Linear between points, level beyond the ends."""
    if x <= xs[0]:
        return ys[0]
    if x >= xs[-1]:
        return ys[-1]
    i = bisect.bisect_right(xs, x)
    share = (x - xs[i - 1]) / (xs[i] - xs[i - 1])
    return ys[i - 1] + share * (ys[i] - ys[i - 1])
