"""The thread pool: calls from several threads, forks, and modes that other libraries leave behind."""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import platform
import threading

import numpy as np
import pytest

from twoends.kernels.native_ops import native_ops

native = importlib.import_module("twoends.kernels._native")
ISA = native.available_isas()[0]


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("rows", [8, 3000], ids=["small", "divided"])
def test_four_python_threads_may_call_at_once(threads, rows, make, same, multiply):
    ops = native_ops(ISA, threads)
    matrix, inputs = make.matrix("bf16", rows, 256), [make.normal(2, 256) for _ in range(4)]
    expected = [multiply(ops, matrix, x) for x in inputs]
    failures: list[BaseException] = []

    def work(i: int) -> None:
        try:
            for _ in range(25):
                same(multiply(ops, matrix, inputs[i]), expected[i])
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=60)
    assert not any(worker.is_alive() for worker in workers)
    assert not failures


def test_many_calls_in_a_row_wake_and_sleep(make, same, multiply):
    ops = native_ops(ISA, 3)
    matrix, x_TX = make.matrix("mxfp4", 640, 512), make.normal(1, 512)
    expected = multiply(ops, matrix, x_TX)
    for pause in range(60):
        if pause % 20 == 0:
            threading.Event().wait(0.005)
        same(multiply(ops, matrix, x_TX), expected)


def test_pools_come_and_go_without_leaving_threads():
    before = threads_of_this_process()
    for _ in range(20):
        native.Kernels(ISA, 4)
    gc.collect()
    assert threads_of_this_process() <= before


def threads_of_this_process() -> int:
    if not os.path.isdir("/proc/self/task"):
        pytest.skip("no /proc here")
    return len(os.listdir("/proc/self/task"))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_works_alone_and_ends(make, multiply):
    ops = native_ops(ISA, 2)
    matrix, x_TX = make.matrix("bf16", 3000, 256), make.normal(1, 256)
    expected = multiply(ops, matrix, x_TX)
    child = os.fork()
    if child == 0:
        right = np.array_equal(multiply(ops, matrix, x_TX), expected)
        del ops
        os._exit(0 if right else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_the_interpreter_runs_on_while_a_large_call_works(make):
    ops = native_ops("plain", 1)
    matrix, x_TX = make.matrix("bf16", 4000, 1024), make.normal(4, 1024)
    out_TY = np.empty((4, 4000), np.float32)
    worker = threading.Thread(target=lambda: ops.matmul(matrix, x_TX, out_TY=out_TY, first_row=0))
    worker.start()
    steps = 0
    while worker.is_alive():
        steps += 1
    assert steps > 10


@pytest.mark.parametrize("threads", [0, -1])
def test_a_pool_needs_a_thread(threads):
    with pytest.raises((ValueError, TypeError)):
        native.Kernels(ISA, threads)


def test_an_unknown_set_is_refused():
    with pytest.raises(ValueError, match="does not run 'sse9'"):
        native.Kernels("sse9", 1)


@pytest.mark.skipif(
    platform.system() != "Linux" or platform.machine() != "x86_64",
    reason="sets x86's control word through glibc",
)
@pytest.mark.parametrize("isa", native.available_isas())
def test_a_rounding_mode_left_by_another_library_changes_nothing(isa, make, same, multiply):
    ops = native_ops(isa, 1)
    matrix, x_TX = make.matrix("bf16", 40, 64), make.normal(1, 64)
    expected = multiply(ops, matrix, x_TX)
    libm = ctypes.CDLL("libm.so.6")
    upward = 0x800
    libm.fesetround(upward)
    try:
        got = multiply(ops, matrix, x_TX)
        assert libm.fegetround() == upward
    finally:
        libm.fesetround(0)
    same(got, expected)
