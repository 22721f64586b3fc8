"""The work of `twoends size`: options -> question -> report -> screen, JSON or page."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import re
from pathlib import Path

from twoends.cli.command import Values
from twoends.cli.screen import Screen
from twoends.cli.size_screen import draw
from twoends.engine.device import rate_under
from twoends.engine.memory import default_budget_bytes
from twoends.errors import OptionError
from twoends.kernels.built import is_built
from twoends.kernels.choose import load_module
from twoends.kernels.cores import allowed_cores
from twoends.sizing.answer import answer
from twoends.sizing.calibration import ComputeRate, kept_compute
from twoends.sizing.evidence import Figure, Unit, measured, reported
from twoends.sizing.links import ZEN4_CORE, CoreRate
from twoends.sizing.machines import Machine, MachineTable, load_machines
from twoends.sizing.models import load_model
from twoends.sizing.money import OUTPUT_ONLY, Owning
from twoends.sizing.page import page
from twoends.sizing.prices import YOURS, PriceTable, load_prices
from twoends.sizing.report import Question, Report
from twoends.sizing.routing import Rows

_OWNING = ("years", "energy", "watts", "residual", "pue")


def size(values: Values, screen: Screen) -> None:
    """`twoends size`. Raises OptionError, ConfigError, and DoesNotFit where nothing has room."""
    if values.html is not None:
        _check_target(values.html)
    report = answer(_question(values))
    if values.example:
        report = _example_of(report)
    if values.html is not None:
        _write(values.html, page(report))
    if values.json:
        screen.line(json.dumps(report.as_object()))
        return
    draw(report if values.example else _without_example(report), screen)
    if values.html is not None:
        screen.note(f"  page written to {values.html}")


def _question(values: Values) -> Question:
    machines, prices = load_machines(values.machines), load_prices(values.prices)
    for word in values.exchange:
        prices.add_exchange(word)
    currency = None if values.currency is None else _currency(values.currency, prices)
    model = load_model(values.model or "kimi-k3")
    machine, core = _machine(values, machines)
    return Question(
        model=model,
        machine=machine,
        rows=_rows(values),
        context_tokens=values.context,
        core=core,
        experts_as=values.experts_as,
        machines=machines,
        prices=prices,
        rent=values.rent,
        mix=values.mix or OUTPUT_ONLY,
        utilisation=values.utilisation,
        tokens_per_s=values.tokens_per_s,
        owning=_owning(values, machine),
        currency=currency,
    )


def _currency(word: str, prices: PriceTable) -> str:
    """A currency with an exchange rate. Raises OptionError with the nearest one."""
    prices.rate(word.upper())
    return word.upper()


def _rows(values: Values) -> Rows:
    if values.draft and values.acceptance is None:
        raise OptionError(
            "--draft needs --acceptance: what share of drafts is right.",
            remedies=["Prompt lookup on text and code was seen between 0.5 and 0.9:  --acceptance 0.7"],
        )
    if values.acceptance is not None and not values.draft:
        raise OptionError("--acceptance has no use without --draft.")
    acceptance = 0.0 if values.acceptance is None else values.acceptance
    if not 0 <= acceptance <= 1:
        raise OptionError(f"--acceptance is {acceptance:g}; it must be between 0 and 1.")
    return Rows(sequences=values.sequences, drafts=values.draft, acceptance=acceptance)


def _machine(values: Values, table: MachineTable) -> tuple[Machine | None, CoreRate]:
    """A machine of the table, or accelerators, or a host as described, or this one."""
    if values.machine is not None and values.gpus is not None:
        raise OptionError("--machine and --gpus both say what accelerators there are; give one of them.")
    if values.machine is not None:
        return _changed(table.machine(values.machine), values), ZEN4_CORE
    if values.gpus is not None:
        count, card = table.group(values.gpus)
        name = f"{count} x {card.name}"
        machine = Machine(name=name, accelerator=card, count=count, source=card.source)
        return _changed(machine, values), ZEN4_CORE
    if any(key in values.given for key in ("ram", "disk", "cores", "mem_bw")):
        if values.ram is None:
            raise OptionError("a machine as described needs its memory:  --ram 64GB")
        return _changed(Machine(name="the machine as described", source=YOURS), values), ZEN4_CORE
    return this_machine(Path())


def _changed(machine: Machine, values: Values) -> Machine:
    """With what the command line says of it."""

    def given(value: float | None, unit: Unit, old: Figure | None) -> Figure | None:
        return old if value is None else reported(value, unit, YOURS)

    return dataclasses.replace(
        machine,
        ram_bytes=given(values.ram, "bytes", machine.ram_bytes),
        disk_rate=given(values.disk, "bytes/s", machine.disk_rate),
        memory_rate=given(values.mem_bw, "bytes/s", machine.memory_rate),
        cores=values.cores or machine.cores,
    )


def this_machine(directory: Path) -> tuple[Machine | None, CoreRate]:
    """What `doctor` kept of this machine and the disk of `directory`; no machine where it kept nothing."""
    disk = rate_under(directory)
    if disk is None:
        return None, ZEN4_CORE
    threads = allowed_cores()[0]
    isa = os.environ.get("TWOENDS_ISA") or (load_module().available_isas()[0] if is_built() else None)
    compute = kept_compute(directory, isa=isa, threads=threads)
    today = datetime.date.today().isoformat()
    machine = Machine(
        name="this machine",
        ram_bytes=measured(default_budget_bytes(), "bytes", f"80 % of what is available, {today}"),
        disk_rate=measured(disk.bytes_per_s, "bytes/s", f"twoends doctor, {disk.date}"),
        cores=threads,
        source="twoends doctor",
    )
    return machine, ZEN4_CORE if compute is None else _core(compute)


def _core(compute: ComputeRate) -> CoreRate:
    """One thread's share of measured passes; many rows at once were not measured there."""
    source = f"twoends doctor, {compute.date}, passes on {compute.threads} threads"
    return dataclasses.replace(
        ZEN4_CORE,
        bf16_rate=measured(compute.bf16_bytes_per_s / compute.threads, "bytes/s", source),
        mxfp4_rate=measured(compute.mxfp4_bytes_per_s / compute.threads, "bytes/s", source),
    )


def _owning(values: Values, machine: Machine | None) -> Owning | None:
    if values.buy is None:
        given = [key for key in _OWNING if key in values.given]
        if given:
            raise OptionError(f"--{given[0]} has no use without --buy, the price of the machine.")
        return None
    if values.rent is not None:
        raise OptionError("--rent and --buy both say what an hour costs; give one of them.")
    for key in ("years", "energy"):
        if getattr(values, key) is None:
            raise OptionError(
                f"--buy needs --{key}.", remedies=["Like:  --buy 450000USD --years 4 --energy 0.12USD"]
            )
    watts = _watts(values, machine)
    return Owning(
        price=values.buy,
        years=values.years,
        residual_share=values.residual or 0.0,
        watts=watts,
        overhead=1.0 if values.pue is None else values.pue,
        energy=values.energy,
    )


def _watts(values: Values, machine: Machine | None) -> Figure:
    if values.watts is not None:
        return reported(values.watts, "W", YOURS)
    if machine is None or machine.accelerator is None:
        raise OptionError("--buy needs --watts: what the machine draws.")
    card = machine.accelerator
    return reported(card.watts.value * machine.count, "W", f"{machine.count} x {card.source}")


def _example_of(report: Report) -> Report:
    sections = tuple(section for section in report.sections if section.key == "example")
    if not sections:
        raise OptionError("the worked example is of kimi-k3.", remedies=["twoends size kimi-k3 --example"])
    return dataclasses.replace(report, sections=sections)


def _without_example(report: Report) -> Report:
    """The screen is long enough; the example has one of its own."""
    return dataclasses.replace(
        report, sections=tuple(section for section in report.sections if section.key != "example")
    )


def _check_target(path: Path) -> None:
    """Before anything is reckoned."""
    if not re.search(r"\.html?$", path.name):
        raise OptionError(f"--html: {path.name} must end in .html.")
    if not path.absolute().parent.is_dir() or path.is_dir():
        raise OptionError(f"--html: {path} can't be written: there is no such directory, or it is one.")


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OptionError(f"--html: {path} can't be written: {error.strerror}.") from None
