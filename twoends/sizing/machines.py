"""Machines: disk, host memory, cores, accelerators. From a table with sources, or as described."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from twoends.errors import OptionError
from twoends.sizing.evidence import Figure, reported
from twoends.sizing.tables import Entry, asset, check_keys, entries, nearest, read_toml

_GROUP = re.compile(r"\s*([0-9]{1,6})\s*[xX]\s*(\S+)\s*")
_KEYS = ("generation", "accelerator", "disk", "machine")
_MAX_ACCELERATORS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """One kind of accelerator. Links are per accelerator and direction; `formats` is what it multiplies."""

    name: str
    generation: str
    formats: tuple[str, ...]
    memory_bytes: Figure
    memory_rate: Figure
    link_rate: Figure
    pcie_rate: Figure
    flops: Figure
    watts: Figure
    node: int
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Where a model would run; what is None is not known. `count` accelerators are `count / node` nodes."""

    name: str
    about: str = ""
    ram_bytes: Figure | None = None
    memory_rate: Figure | None = None
    disk_rate: Figure | None = None
    cores: int | None = None
    accelerator: Accelerator | None = None
    count: int = 0
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineTable:
    """All machines by name; a user's file adds to those that come along, and replaces those of its names."""

    accelerators: dict[str, Accelerator]
    disks: dict[str, Figure]
    machines: dict[str, Machine]

    def machine(self, name: str) -> Machine:
        """Raises OptionError with the nearest known name."""
        return self.machines[_known(name, list(self.machines), "machine", option="--machine")]

    def accelerator(self, name: str) -> Accelerator:
        """Raises OptionError with the nearest known name."""
        return self.accelerators[_known(name, list(self.accelerators), "accelerator", option="--gpus")]

    def group(self, word: str) -> tuple[int, Accelerator]:
        """ "8xB300". Raises OptionError."""
        match = _GROUP.fullmatch(word)
        if match is None:
            raise OptionError(
                f"--gpus: '{word}' is not a number of accelerators.", remedies=["Write:  --gpus 8xB300"]
            )
        count = int(match.group(1))
        if not 1 <= count <= _MAX_ACCELERATORS:
            raise OptionError(f"--gpus: {count:,} accelerators; it must be 1 to {_MAX_ACCELERATORS:,}.")
        return count, self.accelerator(match.group(2))


def load_machines(extra: Path | None = None) -> MachineTable:
    """The table that comes along, and a user's. Raises OptionError for a file that is not as it should be."""
    table = MachineTable(accelerators={}, disks={}, machines={})
    generations: dict[str, tuple[str, ...]] = {}
    for path in (asset("machines.toml"), *([] if extra is None else [extra])):
        tables = read_toml(path)
        check_keys(tables, _KEYS, path=path)
        for entry in entries(tables, "generation", path=path):
            generations[entry.text("name")] = entry.texts("formats")
            entry.origin()
            entry.done()
        for entry in entries(tables, "accelerator", path=path):
            made = _accelerator(entry, generations)
            table.accelerators[made.name] = made
        for entry in entries(tables, "disk", path=path):
            name, rate = entry.text("name"), _figure(entry, "read_gbs", 1e9)
            table.disks[name] = rate
            entry.done()
        for entry in entries(tables, "machine", path=path):
            machine = _machine(entry, table)
            table.machines[machine.name] = machine
    return table


def _accelerator(entry: Entry, generations: dict[str, tuple[str, ...]]) -> Accelerator:
    generation = entry.text("generation")
    if generation not in generations:
        raise entry.wrong(f"generation '{generation}' is in no [[generation]]")
    source = entry.origin()
    made = Accelerator(
        name=entry.text("name"),
        generation=generation,
        formats=generations[generation],
        memory_bytes=reported(entry.number("memory_gb") * 1e9, "bytes", source),
        memory_rate=_figure(entry, "memory_gbs", 1e9),
        link_rate=_figure(entry, "link_gbs", 1e9),
        pcie_rate=_figure(entry, "pcie_gbs", 1e9),
        flops=reported(entry.number("bf16_tflops") * 1e12, "FLOP/s", source),
        watts=reported(entry.number("watts"), "W", source),
        node=entry.whole("node"),
        source=source,
    )
    entry.done()
    return made


def _machine(entry: Entry, table: MachineTable) -> Machine:
    source = entry.origin()
    disk = None
    if entry.has("disk"):
        name = entry.text("disk")
        if name not in table.disks:
            raise entry.wrong(f"'disk' is {name!r}, which is in no [[disk]]")
        disk = table.disks[name]
    elif entry.has("disk_gbs"):
        disk = _figure(entry, "disk_gbs", 1e9)
    count, accelerator = 0, None
    if entry.has("accelerators"):
        count, accelerator = table.group(entry.text("accelerators"))
    made = Machine(
        name=entry.text("name"),
        about=entry.text("about", default=""),
        ram_bytes=reported(entry.number("ram_gb") * 1e9, "bytes", source),
        memory_rate=_figure(entry, "memory_gbs", 1e9),
        disk_rate=disk,
        cores=entry.whole("cores"),
        accelerator=accelerator,
        count=count,
        source=source,
    )
    entry.done()
    return made


def _figure(entry: Entry, key: str, factor: float) -> Figure:
    return reported(entry.number(key) * factor, "bytes/s", entry.origin())


def _known(name: str, known: list[str], noun: str, *, option: str) -> str:
    """The name as it is spelt in the table; case does not matter."""
    for candidate in known:
        if candidate.lower() == name.lower():
            return candidate
    raise OptionError(
        f"{option}: there is no {noun} '{name}'.",
        evidence=[("nearest known name", nearest(name, known)), ("known", ", ".join(known))],
        remedies=["Add your own in a file:  twoends size --machines FILE"],
    )
