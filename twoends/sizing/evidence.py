"""A figure and where it comes from. No number reaches a report without one of the three words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from twoends.units import format_bytes, format_duration

Kind = Literal["measured", "arithmetic", "reported"]
# Bytes are shown in powers of ten; GiB only where it is asked for by name.
Unit = Literal[
    "bytes", "B", "GB", "GiB", "bytes/s", "s", "tokens/s", "tokens/h", "parameters", "count", "ratio",
    "share", "bits", "W", "FLOP/s", "tokens", "money",
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """`value` in `unit`; `source` is a formula, a command or a publication; `of` is a currency."""

    value: float
    unit: Unit
    kind: Kind
    source: str
    of: str = ""

    @property
    def text(self) -> str:
        """The value as people read it, with its unit."""
        return _TEXTS[self.unit](self.value, self.of)

    def as_object(self) -> dict[str, Any]:
        """For JSON."""
        unit = f"{self.of}" if self.unit == "money" else self.unit
        # "B", "GB" and "GiB" are ways to show bytes; the value is in bytes in any case.
        unit = "bytes" if unit in ("B", "GB", "GiB") else unit
        return {
            "value": self.value,
            "unit": unit,
            "kind": self.kind,
            "source": self.source,
            "text": self.text,
        }


def arithmetic(value: float, unit: Unit, source: str, *, of: str = "") -> Figure:
    """A computed figure; `source` is how."""
    return Figure(value=value, unit=unit, kind="arithmetic", source=source, of=of)


def reported(value: float, unit: Unit, source: str, *, of: str = "") -> Figure:
    """Somebody's figure; `source` is whose."""
    return Figure(value=value, unit=unit, kind="reported", source=source, of=of)


def measured(value: float, unit: Unit, source: str, *, of: str = "") -> Figure:
    """A measured figure; `source` is the command, the machine, the date."""
    return Figure(value=value, unit=unit, kind="measured", source=source, of=of)


def _plain(value: float) -> str:
    """Three or more digits, no powers of ten, no needless zeros."""
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    size = abs(value)
    digits = 0 if size >= 1000 else 1 if size >= 100 else 2 if size >= 1 else 4
    return f"{value:,.{digits}f}"


def _percent(share: float) -> str:
    percent = 100 * share
    if 0 < percent < 0.01:
        return "< 0.01 %"
    return f"{percent:.3g} %" if percent < 999.5 else f"{percent:,.0f} %"


_TEXTS: dict[Unit, Callable[[float, str], str]] = {
    "bytes": lambda v, _: format_bytes(v),
    "B": lambda v, _: f"{v:,.0f} B",
    "GB": lambda v, _: f"{v / 1e9:,.1f} GB" if v >= 5e7 or not v else format_bytes(v),
    "GiB": lambda v, _: f"{v / 2**30:,.3f} GiB",
    "bytes/s": lambda v, _: f"{format_bytes(v)}/s",
    "s": lambda v, _: format_duration(v),
    "tokens/s": lambda v, _: f"{v:,.0f} tokens/s" if v >= 100 else f"{v:.3g} tokens/s",
    "tokens/h": lambda v, _: f"{v / 1e6:,.2f} million tokens/h",
    "parameters": lambda v, _: f"{v:,.0f}",
    "count": lambda v, of: f"{_plain(v)} {of}".rstrip(),
    "ratio": lambda v, _: f"{v:.2f} x",
    "share": lambda v, _: _percent(v),
    "bits": lambda v, _: f"{_plain(v)} bits",
    "W": lambda v, _: f"{v:,.0f} W",
    "FLOP/s": lambda v, _: f"{v / 1e12:,.1f} TFLOP/s",
    "tokens": lambda v, _: f"{v:,.0f} tokens",
    "money": lambda v, of: f"{v:,.0f} {of}" if abs(v) >= 10_000 else f"{v:,.2f} {of}",
}
