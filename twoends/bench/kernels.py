"""How fast the native kernels are, from memory, and what share of the memory's bandwidth that is.

Bits come first: the self-check at load, and then every kernel's first rows against the reference on the
data that is timed. A kernel that differs ends the benchmark with NotSound.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from twoends.bench.machine import last_cache_bytes, machine
from twoends.bench.report import KernelReport, KernelRow, Spread
from twoends.errors import NotSound
from twoends.kernels.choose import choose, load_module
from twoends.kernels.ops import F32, Bytes, Format, Matrix, Ops
from twoends.kernels.reference import reference_ops
from twoends.kernels.reference.matmul import row_slice

MIN_REPEATS = 5
INPUTS = (1, 8, 64)
SEQUENCE_INPUTS = (1, 64)
# Rows and columns of Kimi K3: an expert's gate and down projections, trunk projections, the router.
MATRICES: tuple[tuple[Format, int, int], ...] = (
    ("mxfp4", 3072, 3584),
    ("mxfp4", 3584, 3072),
    ("bf16", 1536, 7168),
    ("bf16", 7168, 1536),
    ("f32", 896, 7168),
)
_MIN_WORKING_SET = 128 * 10**6
_CACHES = 4
_CHECKED_ROWS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """Something to time: `run(i)` does the i-th call, on other memory each time."""

    kernel: str
    shape: str
    num_inputs: int
    run: Callable[[int], None]
    call_bytes: int
    call_flops: int
    num_calls: int


def bench_kernels(
    *,
    threads: int | None,
    isa: str | None,
    seconds: float = 20.0,
    progress: Callable[[str], None] = lambda _: None,
) -> KernelReport:
    """Checks, then measures every kernel for about `seconds` in all (at least five repeats of each).

    `threads` None means all cores this process may use; `isa` is the value of TWOENDS_ISA or None;
    `progress` is told what is being measured. Raises OptionError without native kernels, NotSound when a
    bit differs from the reference.
    """
    progress("checking every kernel against the reference")
    choice = choose(threads=threads, isa=isa, kernels="native")
    assert choice.isa is not None, "native kernels have an instruction set"
    native = load_module()
    card = machine(built_by=native.BUILT_BY)
    buffer = _weights(max(_MIN_WORKING_SET, _CACHES * last_cache_bytes()))
    one, many = native.Kernels(choice.isa, 1), native.Kernels(choice.isa, choice.threads)
    jobs = list(_jobs(choice.ops, buffer))
    share_s = seconds / (len(jobs) + 2)
    progress("measuring the memory")
    read_one, read_all = (_bandwidth(k, buffer, share_s) for k in (one, many))
    rows = []
    for job in jobs:
        progress(f"measuring {job.kernel}, {job.shape}, {job.num_inputs} rows")
        rows.append(_measure(job, share_s, read_all.median))
    return KernelReport(
        machine=card,
        isa=choice.isa,
        threads=choice.threads,
        read_one_thread=read_one,
        read_all_threads=read_all,
        working_set_bytes=buffer.size,
        rows=tuple(rows),
    )


def _weights(size: int) -> Bytes:
    """Bytes that are ordinary numbers as bf16 and as f32, 0.5 to 2 in magnitude, and any codes as mxfp4."""
    words = np.random.default_rng(0).integers(0, 256, size // 2, dtype=np.uint16)
    words[::3] |= 0x8000
    words |= 0x3F00
    return words.view(np.uint8)


def _jobs(ops: Ops, buffer: Bytes) -> Iterator[_Job]:
    for (form, rows, cols), num_inputs in itertools.product(MATRICES, INPUTS):
        yield _matmul_job(ops, buffer, form, rows, cols, num_inputs)
    for num_inputs in SEQUENCE_INPUTS:
        yield _kda_job(ops, buffer, num_inputs)
    for num_inputs in SEQUENCE_INPUTS:
        yield _mla_job(ops, buffer, num_inputs)


def _random(seed: int, *shape: int) -> F32:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _matrices(buffer: Bytes, form: Format, rows: int, cols: int) -> list[Matrix]:
    """The buffer as matrices one after another; mxfp4 has its scales in the same stretch."""
    data_bytes = {"mxfp4": rows * cols // 2, "bf16": rows * cols * 2, "f32": rows * cols * 4}[form]
    stretch = data_bytes + (rows * cols // 32 if form == "mxfp4" else 0)
    matrices = []
    for at in range(0, buffer.size - stretch + 1, stretch):
        data = buffer[at : at + data_bytes]
        scale = np.bitwise_or(buffer[at + data_bytes : at + stretch] & 3, 124) if form == "mxfp4" else None
        matrices.append(Matrix(format=form, rows=rows, cols=cols, data=data, scale=scale))
    return matrices


def _matmul_job(ops: Ops, buffer: Bytes, form: Format, rows: int, cols: int, num_inputs: int) -> _Job:
    matrices = _matrices(buffer, form, rows, cols)
    x_TX, out_TY = _random(1, num_inputs, cols), np.empty((num_inputs, rows), np.float32)
    part = row_slice(matrices[0], 0, _CHECKED_ROWS)
    expected_TY = np.empty((num_inputs, _CHECKED_ROWS), np.float32)
    reference_ops().matmul(part, x_TX, out_TY=expected_TY, first_row=0)
    ops.matmul(matrices[0], x_TX, out_TY=out_TY, first_row=0)
    _require_equal(f"matmul {form}", out_TY[:, :_CHECKED_ROWS], expected_TY)

    def run(i: int) -> None:
        ops.matmul(matrices[i], x_TX, out_TY=out_TY, first_row=0)

    scale = matrices[0].scale
    return _Job(
        kernel=f"matmul {form}",
        shape=f"{rows} x {cols}",
        num_inputs=num_inputs,
        run=run,
        call_bytes=matrices[0].data.size + (0 if scale is None else scale.size),
        call_flops=2 * rows * cols * num_inputs,
        num_calls=len(matrices),
    )


def _kda_job(ops: Ops, buffer: Bytes, num_tokens: int) -> _Job:
    """The recurrence of a K3 layer: 96 heads, 128 x 128 of state each, read and written."""
    heads, dim = 96, 128
    size = heads * dim * dim
    states = buffer.view(np.float32)[: buffer.size // 4 // size * size].copy().reshape(-1, heads, dim, dim)
    q, k, v = (_random(seed, num_tokens, heads, dim) * np.float32(0.1) for seed in (2, 3, 4))
    alpha = np.random.default_rng(5).random((num_tokens, heads, dim), np.float32)
    beta = np.random.default_rng(6).random((num_tokens, heads), np.float32)

    def steps(kernels: Ops, state: F32, count: int) -> F32:
        return kernels.kda_steps(
            q_THK=q[:count], k_THK=k[:count], v_THV=v[:count], alpha_THK=alpha[:count], beta_TH=beta[:count],
            state_HKV=state,
        )  # fmt: skip

    few, first = min(num_tokens, 2), states[0].copy()
    _require_equal("kda_steps", steps(ops, states[0].copy(), few), steps(reference_ops(), first, few))
    return _Job(
        kernel="kda_steps",
        shape=f"{heads} heads {dim} x {dim}",
        num_inputs=num_tokens,
        run=lambda i: void(steps(ops, states[i], num_tokens)),
        call_bytes=2 * 4 * size,
        call_flops=7 * size * num_tokens,
        num_calls=len(states),
    )


def _mla_job(ops: Ops, buffer: Bytes, num_rows: int) -> _Job:
    """Latent attention of a K3 layer after 1,024 positions: the up-projection comes from memory."""
    heads, latent, rope, nope, value, seen = 96, 512, 64, 128, 128, 1024
    matrices = _matrices(buffer, "bf16", heads * (nope + value), latent)
    q_THQ = _random(7, num_rows, heads, nope + rope) * np.float32(0.05)
    cache_CM = _random(8, seen + num_rows - 1, latent + rope) * np.float32(0.1)

    def attend(kernels: Ops, kv_b: Matrix, num_heads: int) -> F32:
        out_THV = np.zeros((num_rows, heads, value), np.float32)
        kernels.mla_heads(
            kv_b, q_THQ=q_THQ, cache_CM=cache_CM, start=seen - 1, first_head=0, num_heads=num_heads,
            scale=(nope + rope) ** -0.5, out_THV=out_THV,
        )  # fmt: skip
        return out_THV[:1, :num_heads]

    one_head = row_slice(matrices[0], 0, nope + value)
    if num_rows == 1:
        _require_equal("mla_heads", attend(ops, one_head, 1), attend(reference_ops(), one_head, 1))
    return _Job(
        kernel="mla_heads",
        shape=f"{heads} heads, {seen} seen",
        num_inputs=num_rows,
        run=lambda i: void(attend(ops, matrices[i], heads)),
        call_bytes=matrices[0].data.size,
        call_flops=2 * heads * num_rows * ((nope + value) * latent + seen * (2 * latent + rope)),
        num_calls=len(matrices),
    )


def void(_: object) -> None:
    """Drops a result."""


def _require_equal(kernel: str, got: F32, expected: F32) -> None:
    if not np.array_equal(got, expected, equal_nan=True):
        raise NotSound(
            f"{kernel} differs from the reference in {int((got != expected).sum())} of {got.size} numbers.",
            remedies=["Nothing was timed. Rebuild with the project's flags:  make native"],
        )


def _bandwidth(kernels: Any, buffer: Bytes, share_s: float) -> Spread:
    rates: list[float] = []
    deadline = time.perf_counter() + share_s
    kernels.read(buffer)
    while len(rates) < MIN_REPEATS or time.perf_counter() < deadline:
        start = time.perf_counter()
        kernels.read(buffer)
        rates.append(buffer.size / (time.perf_counter() - start))
    return Spread.of(rates)


def _measure(job: _Job, share_s: float, bandwidth: float) -> KernelRow:
    """Repeats of several calls, which walk through the whole working set: none finds its weights cached."""
    turn = itertools.cycle(range(job.num_calls))
    start = time.perf_counter()
    job.run(next(turn))
    once_s = time.perf_counter() - start
    calls = max(1, min(job.num_calls, int(share_s / (MIN_REPEATS + 1) / once_s)))
    rates: list[float] = []
    deadline = time.perf_counter() + share_s
    while len(rates) < MIN_REPEATS or time.perf_counter() < deadline:
        start = time.perf_counter()
        for _ in range(calls):
            job.run(next(turn))
        rates.append(job.call_bytes * calls / (time.perf_counter() - start))
    spread = Spread.of(rates)
    return KernelRow(
        kernel=job.kernel,
        shape=job.shape,
        num_inputs=job.num_inputs,
        bytes_per_s=spread,
        share_of_bandwidth=spread.median / bandwidth,
        flops_per_s=spread.median / job.call_bytes * job.call_flops,
    )
