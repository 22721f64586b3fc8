"""The kernel benchmark: bits before rates, a machine's card, and rows that add up."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from twoends.bench import kernels as bench
from twoends.bench import machine as machines
from twoends.bench.report import KernelReport, Spread
from twoends.errors import NotSound
from twoends.kernels.native_ops import native_ops


@pytest.fixture(scope="module")
def report() -> KernelReport:
    """A benchmark that is short because its working set is small."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "_MIN_WORKING_SET", 26 * 10**6)
        patch.setattr(bench, "last_cache_bytes", lambda: 0)
        patch.setattr(bench, "MATRICES", (("mxfp4", 96, 128), ("bf16", 64, 96), ("f32", 32, 64)))
        patch.setattr(bench, "INPUTS", (1, 3))
        patch.setattr(bench, "SEQUENCE_INPUTS", (1,))
        return bench.bench_kernels(threads=2, isa=None, seconds=0.2)


def test_every_kernel_has_a_row_with_repeats_and_a_range(report):
    names = [(row.kernel, row.num_inputs) for row in report.rows]
    assert names == [
        ("matmul mxfp4", 1), ("matmul mxfp4", 3), ("matmul bf16", 1), ("matmul bf16", 3),
        ("matmul f32", 1), ("matmul f32", 3), ("kda_steps", 1), ("mla_heads", 1),
    ]  # fmt: skip
    for row in report.rows:
        assert row.bytes_per_s.repeats >= bench.MIN_REPEATS
        assert row.bytes_per_s.low <= row.bytes_per_s.median <= row.bytes_per_s.high
        assert row.share_of_bandwidth == pytest.approx(
            row.bytes_per_s.median / report.read_all_threads.median
        )


def test_the_report_is_an_object_of_json(report):
    read = json.loads(json.dumps(report.as_json()))
    assert read["machine"]["cores"] == report.machine.cores
    assert read["rows"][0]["bytes_per_s"]["repeats"] >= 5
    assert read["threads"] == 2


def test_the_table_has_a_heading_for_every_column_and_fits_the_screen(report):
    headings, rows = report.headings(), report.table()
    assert all(len(row) == len(headings) for row in rows)
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    assert sum(widths) + 2 * len(widths) <= 80


def test_nothing_is_timed_when_a_bit_differs(monkeypatch):
    right = native_ops("plain", 1)

    def wrong(matrix, x_TX, *, out_TY, first_row):
        right.matmul(matrix, x_TX, out_TY=out_TY, first_row=first_row)
        out_TY[0, 2] = np.nextafter(out_TY[0, 2], np.float32(np.inf))

    ops = dataclasses.replace(right, matmul=wrong)
    with pytest.raises(NotSound, match="matmul bf16 differs from the reference in 1 of 5 numbers"):
        bench._matmul_job(ops, bench._weights(10**5), "bf16", 8, 64, 1)


def test_the_weights_of_the_benchmark_are_ordinary_numbers():
    data = bench._weights(10**5)
    bf16 = (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    for values in (bf16, data.view(np.float32)):
        assert np.isfinite(values).all()
        assert 0.4 < np.abs(values).min() < np.abs(values).max() < 2.1


def test_a_spread_is_median_and_range():
    assert Spread.of([3.0, 1.0, 10.0]) == Spread(median=3.0, low=1.0, high=10.0, repeats=3)


def test_the_card_names_the_disk_of_a_directory(tmp_path):
    card = machines.machine(directory=tmp_path, built_by="gcc 12.2, -O3")
    rows = dict(card.rows())
    assert card.cores >= 1
    assert rows["build"].endswith("gcc 12.2, -O3")
    assert rows["date"].endswith("UTC")
    assert "disk" in rows


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [({}, 0), ({"index0/size": "32K", "index3/size": "16384K"}, 2**24), ({"index0/size": "8M"}, 2**23)],
)
def test_the_largest_cache_is_found(tmp_path, sizes, expected):
    for name, text in sizes.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text + "\n")
    assert machines.last_cache_bytes(tmp_path) == expected


@pytest.mark.parametrize(("load", "busy"), [(0.2, False), (6.0, True)])
def test_a_busy_machine_is_said_to_be_busy(load, busy):
    card = dataclasses.replace(machines.machine(), load=load, cores=4)
    assert ("rates are low" in dict(card.rows())["load"]) == busy
