"""Which kernels run: by default, by wish, and when something is broken."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from twoends.errors import NotSound, OptionError
from twoends.kernels import choose as module
from twoends.kernels import selfcheck
from twoends.kernels.choose import choose
from twoends.kernels.cores import allowed_cores, cgroup_quota
from twoends.kernels.reference import reference_ops

native = importlib.import_module("twoends.kernels._native")


def test_the_fastest_instruction_set_is_the_default():
    choice = choose(threads=None, isa=None, kernels=None)
    assert choice.isa == native.available_isas()[0]
    assert choice.ops.backend == f"native {choice.isa}"
    assert choice.threads == allowed_cores()[0]


@pytest.mark.parametrize("isa", native.available_isas())
def test_an_instruction_set_can_be_forced(isa):
    choice = choose(threads=2, isa=isa, kernels=None)
    assert (choice.isa, choice.threads) == (isa, 2)
    assert dict(choice.reasons)["instructions"] == f"{isa}, from TWOENDS_ISA"


def test_an_unknown_instruction_set_gets_the_nearest_name_and_what_this_machine_runs():
    with pytest.raises(
        OptionError, match="TWOENDS_ISA=avx51 is not an instruction set; did you mean 'avx512'"
    ) as e:
        choose(threads=1, isa="avx51", kernels=None)
    assert "This machine runs: " + ", ".join(native.available_isas()) in str(e.value)


def test_an_instruction_set_of_another_machine_is_refused():
    absent = next(isa for isa in module.ISAS if isa not in native.available_isas())
    with pytest.raises(OptionError, match=f"TWOENDS_ISA={absent} can't be run on this machine"):
        choose(threads=1, isa=absent, kernels=None)


@pytest.mark.parametrize("threads", [0, -1, 4000])
def test_a_number_of_threads_out_of_range_is_refused(threads):
    with pytest.raises(OptionError, match=f"--threads {threads} is not between 1 and"):
        choose(threads=threads, isa=None, kernels=None)


def test_the_reference_can_be_asked_for():
    choice = choose(threads=None, isa=None, kernels="reference")
    assert (choice.ops.backend, choice.isa, choice.threads) == ("reference", None, 1)


def test_an_instruction_set_for_the_reference_is_a_contradiction():
    with pytest.raises(OptionError, match="TWOENDS_ISA=plain chooses among native kernels"):
        choose(threads=None, isa="plain", kernels="reference")


@pytest.fixture
def not_built(monkeypatch):
    monkeypatch.setattr("twoends.kernels.built.MODULE", "twoends.kernels._absent")


def test_without_the_module_the_reference_runs_and_says_how_to_get_the_fast_ones(not_built):
    choice = choose(threads=None, isa=None, kernels=None)
    assert choice.ops.backend == "reference"
    assert "no C++ compiler at install" in dict(choice.reasons)["kernels"]
    assert "apt install g++ && pip install --force-reinstall" in dict(choice.reasons)["kernels"]


@pytest.mark.parametrize("wish", [{"kernels": "native", "isa": None}, {"kernels": None, "isa": "plain"}])
def test_without_the_module_a_wish_for_it_is_an_error(not_built, wish):
    with pytest.raises(OptionError, match="needs the native kernels, and this installation has none"):
        choose(threads=None, **wish)


def test_a_module_that_does_not_load_is_an_error(monkeypatch, tmp_path):
    broken = tmp_path / "twoends_broken_native.py"
    broken.write_text("raise ImportError('undefined symbol: kernels')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(module, "MODULE", "twoends_broken_native")
    with pytest.raises(NotSound, match="installed but do not load") as e:
        choose(threads=None, isa=None, kernels=None)
    assert "undefined symbol: kernels" in str(e.value)
    assert str(broken) in str(e.value)


def test_a_module_of_another_version_is_an_error(monkeypatch, tmp_path):
    (tmp_path / "twoends_old_native.py").write_text("INTERFACE = -3\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(module, "MODULE", "twoends_old_native")
    with pytest.raises(NotSound, match="built from another version: interface -3, expected"):
        choose(threads=None, isa=None, kernels=None)


def test_importing_the_choice_loads_no_native_code():
    program = "import sys, twoends.kernels.choose; sys.exit('twoends.kernels._native' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_the_stored_vectors_are_the_reference(same):
    same(selfcheck.results(reference_ops()), selfcheck.stored_vectors())


def test_the_vectors_of_every_operation_are_stored():
    names = {name for name, _, _ in selfcheck.cases()}
    assert names == {field for field in reference_ops().__dataclass_fields__ if field != "backend"}


def test_every_operation_passes_the_self_check(native):
    selfcheck.check(native, vectors=selfcheck.stored_vectors(), built_by="")


CASES = [(name, case) for name, case, _ in selfcheck.cases()]


@pytest.mark.parametrize("index", range(len(CASES)), ids=[f"{name}-{i}" for i, (name, _) in enumerate(CASES)])
def test_one_wrong_bit_in_any_case_is_found_and_named(index):
    runs = [run for _, _, run in selfcheck.cases()]
    sizes = [sum(a.size for a in run(reference_ops())) for run in runs]
    vectors = selfcheck.stored_vectors().copy()
    at = sum(sizes[:index]) + sizes[index] // 2
    while not 1e-3 < abs(vectors[at]) < 1e3:
        at += 1
    correct = vectors[at]
    vectors[at] = np.nextafter(correct, np.float32(np.inf))
    name, case = CASES[index]
    with pytest.raises(NotSound, match=f"the native '{name}' differs from the reference") as e:
        selfcheck.check(reference_ops(), vectors=vectors, built_by="gcc 12.2, -O3 -ffast-math")
    text = str(e.value)
    assert f"{case}, element {at - sum(sizes[:index])}" in text
    assert selfcheck.short_hex(correct) in text
    assert "one unit in the last place" in text
    assert "-O3 -ffast-math" in text
    assert e.value.exit_code == 4


@pytest.mark.parametrize(
    ("value", "text"), [(0.8125, "0x1.ap-1"), (-2.0, "-0x1p+1"), (1e-45, "0x1p-149"), (np.inf, "inf")]
)
def test_hexadecimal_numbers_are_short(value, text):
    assert selfcheck.short_hex(np.float32(value)) == text


@pytest.mark.parametrize(
    ("files", "membership", "expected"),
    [
        ({"cpu.max": "max 100000"}, "0::/", None),
        ({"cpu.max": "150000 100000"}, "0::/", 1.5),
        (
            {"cpu.max": "400000 100000", "a/b/cpu.max": "max 100000", "a/cpu.max": "200000 100000"},
            "0::/a/b",
            2.0,
        ),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, "1:cpu:/", None),
        (
            {"cpu,cpuacct/x/cpu.cfs_quota_us": "50000", "cpu,cpuacct/x/cpu.cfs_period_us": "100000"},
            "4:cpu,cpuacct:/x",
            0.5,
        ),
        ({}, "0::/gone/from/here", None),
        ({"memory/cpu.max": "100000 100000"}, "7:memory:/", None),
    ],
)
def test_the_quota_of_control_groups(tmp_path, files, membership, expected):
    root = tmp_path / "cgroup"
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    listing = tmp_path / "self"
    listing.write_text(membership + "\n")
    assert cgroup_quota(listing, root) == expected


def test_a_quota_below_the_cores_limits_the_threads(monkeypatch):
    cores = SimpleNamespace(cpu_count=lambda: 8, sched_getaffinity=lambda _: set(range(8)))
    monkeypatch.setattr("twoends.kernels.cores.os", cores)
    monkeypatch.setattr("twoends.kernels.cores.cgroup_quota", lambda *_: 2.5)
    assert allowed_cores() == (2, "a control group allows 2.5 of 8 cores")


def test_the_affinity_limits_the_threads(monkeypatch):
    cores = SimpleNamespace(cpu_count=lambda: 8, sched_getaffinity=lambda _: {1, 5, 6})
    monkeypatch.setattr("twoends.kernels.cores.os", cores)
    monkeypatch.setattr("twoends.kernels.cores.cgroup_quota", lambda *_: None)
    assert allowed_cores() == (3, "the affinity of this process allows 3 of 8 cores")
