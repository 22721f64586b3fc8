"""Which kernels run, on which instruction set, with how many threads, and why."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
from dataclasses import dataclass
from typing import Any, Literal

from twoends.errors import NotSound, OptionError
from twoends.kernels.built import HOW_TO_GET_THE_FAST_ONES, MODULE, is_built
from twoends.kernels.cores import allowed_cores
from twoends.kernels.native_ops import INTERFACE, ops_of
from twoends.kernels.ops import Ops
from twoends.kernels.reference import reference_ops
from twoends.kernels.selfcheck import check, stored_vectors

ISAS = ("avx512", "avx2", "neon", "plain")
MOST_THREADS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The kernels of a run. `isa` is None for the reference; `reasons` are (subject, text)."""

    ops: Ops
    isa: str | None
    threads: int
    reasons: tuple[tuple[str, str], ...]


def choose(*, threads: int | None, isa: str | None, kernels: Literal["native", "reference"] | None) -> Choice:
    """The fastest kernels that this machine runs, checked bit for bit, unless others are asked for.

    `isa` is the value of TWOENDS_ISA. Raises OptionError for a wrong or unsupported wish, and NotSound
    when the compiled module is there but does not load or does not keep the contract: a broken build is
    never replaced by the slow kernels in silence.
    """
    if threads is not None and not 1 <= threads <= MOST_THREADS:
        raise OptionError(f"--threads {threads} is not between 1 and {MOST_THREADS}.")
    if kernels == "reference":
        if isa is not None:
            raise OptionError(
                f"TWOENDS_ISA={isa} chooses among native kernels, but --kernels reference asks for numpy's."
            )
        return _reference("numpy, as asked")
    if not is_built():
        if kernels == "native" or isa is not None:
            raise _not_built("--kernels native" if kernels == "native" else f"TWOENDS_ISA={isa}")
        return _reference(f"numpy, slow: no C++ compiler at install. Fast ones:  {HOW_TO_GET_THE_FAST_ONES}")
    return _native(threads, isa)


def _reference(why: str) -> Choice:
    return Choice(ops=reference_ops(), isa=None, threads=1, reasons=(("kernels", why),))


def _native(threads: int | None, isa: str | None) -> Choice:
    native = load_module()
    isa, why_isa = instruction_set(native, isa)
    if threads is None:
        threads, origin = allowed_cores()
        why_threads = f"{threads}, {origin}"
    else:
        why_threads = f"{threads}, from --threads"
    ops = ops_of(native.Kernels(isa, threads))
    check(ops, vectors=stored_vectors(), built_by=native.BUILT_BY)
    reasons = (
        ("kernels", f"native, equal to the reference on {isa} (self-check at load)"),
        ("instructions", why_isa),
        ("threads", why_threads),
    )
    return Choice(ops=ops, isa=isa, threads=threads, reasons=reasons)


def instruction_set(native: Any, isa: str | None) -> tuple[str, str]:
    """The set that `isa` (the value of TWOENDS_ISA) names, or the fastest here; and why."""
    available = native.available_isas()
    if isa is None:
        return available[0], f"{available[0]}, the fastest of {', '.join(available)}"
    if isa in available:
        return isa, f"{isa}, from TWOENDS_ISA"
    raise _wrong_isa(isa, available)


def load_module() -> Any:
    """The compiled module. Raises NotSound when it is there and can't be used."""
    spec = importlib.util.find_spec(MODULE)
    where = "not built" if spec is None else str(spec.origin)
    try:
        native = importlib.import_module(MODULE)
    except ImportError as error:
        raise NotSound(
            "the native kernels are installed but do not load.",
            evidence=[("file", where), ("reason", str(error))],
            remedies=[
                f"Build them again:        {HOW_TO_GET_THE_FAST_ONES}",
                "Or run slower and right: twoends run MODEL --kernels reference",
            ],
        ) from error
    found = getattr(native, "INTERFACE", 0)
    if found != INTERFACE:
        raise NotSound(
            f"the native kernels were built from another version: interface {found}, expected {INTERFACE}.",
            evidence=[("file", where)],
            remedies=[f"Build them again:  {HOW_TO_GET_THE_FAST_ONES}  (in a checkout: make native)"],
        )
    return native


def _wrong_isa(isa: str, available: list[str]) -> OptionError:
    if isa in ISAS:
        headline = f"TWOENDS_ISA={isa} can't be run on this machine."
    else:
        near = difflib.get_close_matches(isa.lower(), ISAS, n=1)
        hint = f"; did you mean '{near[0]}'?" if near else "."
        headline = f"TWOENDS_ISA={isa} is not an instruction set{hint}"
    return OptionError(headline, remedies=[f"This machine runs: {', '.join(available)}"])


def _not_built(asked: str) -> OptionError:
    return OptionError(
        f"{asked} needs the native kernels, and this installation has none (no C++ compiler at install).",
        remedies=[f"To build them:  {HOW_TO_GET_THE_FAST_ONES}"],
    )
