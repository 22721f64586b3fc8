"""The results of a kernel benchmark, as data and as rows of a table."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from twoends.bench.machine import Machine
from twoends.units import format_rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Median and range of repeated measurements of one quantity."""

    median: float
    low: float
    high: float
    repeats: int

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        """The spread of `values`, at least one."""
        return Spread(
            median=statistics.median(values), low=min(values), high=max(values), repeats=len(values)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRow:
    """One kernel at one size. `bytes_per_s` counts what must come from memory: weights, or state both ways.

    `num_inputs` are the rows of the pass: 1 is the decoding of one sequence.
    """

    kernel: str
    shape: str
    num_inputs: int
    bytes_per_s: Spread
    share_of_bandwidth: float
    flops_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelReport:
    """All kernels on one machine; every one equalled the reference before it was timed."""

    machine: Machine
    isa: str
    threads: int
    read_one_thread: Spread
    read_all_threads: Spread
    working_set_bytes: int
    rows: tuple[KernelRow, ...]

    def as_json(self) -> dict[str, object]:
        """The fields by name, ready for json.dumps."""
        return asdict(self)

    def card(self) -> list[tuple[str, str]]:
        """(name, value) lines above the table."""
        lines = [
            *self.machine.rows(),
            ("kernels", f"native {self.isa}, threads: {self.threads}, every bit equal to the reference"),
            ("memory read", f"{_rate(self.read_one_thread)}, one thread"),
        ]
        if self.threads > 1:
            lines.append(("", f"{_rate(self.read_all_threads)}, {self.threads} threads"))
        return lines

    @staticmethod
    def headings() -> tuple[str, ...]:
        """Of the columns of `table`; "share" is that of the memory's bandwidth."""
        return ("kernel", "shape", "rows", "GB/s", "range", "share", "GFLOP/s")

    def table(self) -> list[tuple[str, ...]]:
        """One tuple of texts per row."""
        return [
            (
                row.kernel,
                row.shape,
                str(row.num_inputs),
                f"{row.bytes_per_s.median / 1e9:.2f}",
                f"{row.bytes_per_s.low / 1e9:.2f}-{row.bytes_per_s.high / 1e9:.2f}",
                f"{row.share_of_bandwidth:.0%}",
                f"{row.flops_per_s / 1e9:.1f}",
            )
            for row in self.rows
        ]


def _rate(spread: Spread) -> str:
    low, high = spread.low / 1e9, spread.high / 1e9
    return f"{format_rate(spread.median)} ({low:.2f}-{high:.2f}, {spread.repeats} repeats)"
