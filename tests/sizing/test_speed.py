"""Bytes over links: the specification's tables, the wall, the ladder, and the engine's own plan."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from twoends.checkpoint.predicted import predicted_index
from twoends.engine.budget import make_plan
from twoends.errors import DoesNotFit, OptionError
from twoends.sizing.evidence import reported
from twoends.sizing.fit import fit, form_on
from twoends.sizing.ladder import draft_rows, ladder, load_rows
from twoends.sizing.machines import Machine
from twoends.sizing.placement import program_bytes
from twoends.sizing.routing import Rows, curve_of, distinct_experts, uniform_distinct
from twoends.sizing.speed import speed

# n: (distinct by formula, GB of experts a token, GB in all with the trunk streamed)
UNIFORM = {
    1: (16.0, 25.83, 134.6), 2: (31.7, 25.60, 80.0), 4: (62.3, 25.15, 52.4), 8: (120.3, 24.27, 37.9),
    12: (174.2, 23.44, 32.5), 16: (224.4, 22.64, 29.4), 32: (392.6, 19.81, 23.2), 64: (613.2, 15.47, 17.2),
}  # fmt: skip
ONE_TEXT = {1: (25.83, 134.6), 2: (21.40, 75.8), 4: (17.80, 45.0), 8: (15.23, 28.8), 12: (14.64, 23.7)}
# (acceptance, drafts): gain in bytes with the trunk streamed, resident
GAINS = {
    (0.5, 1): (1.33, 0.91), (0.5, 2): (1.42, 0.79), (0.5, 3): (1.40, 0.68), (0.5, 4): (1.35, 0.60),
    (0.5, 5): (1.29, 0.53), (0.5, 7): (1.16, 0.42), (0.7, 1): (1.51, 1.03), (0.7, 2): (1.77, 0.98),
    (0.7, 3): (1.89, 0.92), (0.7, 4): (1.94, 0.85), (0.7, 5): (1.93, 0.79), (0.7, 7): (1.83, 0.67),
    (0.9, 1): (1.69, 1.15), (0.9, 2): (2.19, 1.22), (0.9, 3): (2.57, 1.25), (0.9, 4): (2.86, 1.26),
    (0.9, 5): (3.07, 1.25), (0.9, 7): (3.32, 1.21),
}  # fmt: skip


def host(**rates: float) -> Machine:
    """A machine of stated bytes and rates."""
    cores = int(rates.pop("cores")) if "cores" in rates else None
    units = {"ram_bytes": "bytes", "disk_rate": "bytes/s", "memory_rate": "bytes/s"}
    figures = {key: reported(value, units[key], "a test") for key, value in rates.items()}
    return Machine(name="a host", cores=cores, **figures)


@pytest.mark.parametrize("tokens", UNIFORM)
def test_bytes_of_independent_tokens_are_those_of_the_specification(k3, tokens):
    row = next(row for row in load_rows(k3) if row.tokens == tokens)
    distinct, experts, total = UNIFORM[tokens]
    # printed to one and two digits there; 52.35 is written 52.4
    assert row.distinct == pytest.approx(distinct, abs=0.06)
    assert row.resident_bytes / 1e9 == pytest.approx(experts, abs=0.006)
    assert row.streamed_bytes / 1e9 == pytest.approx(total, abs=0.06)


@pytest.mark.parametrize("tokens", ONE_TEXT)
def test_bytes_of_one_text_are_those_of_the_specification(k3, tokens):
    row = next(row for row in load_rows(k3) if row.tokens == tokens)
    experts, total = ONE_TEXT[tokens]
    assert row.measured_resident_bytes / 1e9 == pytest.approx(experts, abs=0.01)
    assert row.measured_streamed_bytes / 1e9 == pytest.approx(total, abs=0.06)


@pytest.mark.parametrize(("acceptance", "drafts"), GAINS)
def test_gains_of_speculation_are_those_of_the_specification(k3, acceptance, drafts):
    rows = draft_rows(k3, curve_of(k3.model))
    row = next(row for row in rows if (row.acceptance, row.drafts) == (acceptance, drafts))
    assert (round(row.streamed_gain, 2), round(row.resident_gain, 2)) == GAINS[acceptance, drafts]


@pytest.mark.parametrize(
    ("rate", "streamed", "resident", "eight"),
    [(3.2, 42.1, 8.1, 11.8), (6.3, 21.4, 4.1, 6.0), (12.8, 10.5, 2.0, 3.0)],
)
def test_the_floor_of_a_disk_is_that_of_the_specification(k3, rate, streamed, resident, eight):
    rows = {row.tokens: row for row in load_rows(k3)}
    seconds = (rows[1].streamed_bytes, rows[1].resident_bytes, rows[8].streamed_bytes)
    found = [num_bytes / (rate * 1e9) for num_bytes in seconds]
    assert found == pytest.approx([streamed, resident, eight], abs=0.06)


def test_the_formula_has_its_ends(k3):
    config = k3.model.config
    assert uniform_distinct(config, 1) == pytest.approx(16)
    assert uniform_distinct(config, 10**6) == pytest.approx(896)


def test_sequences_are_independent_and_their_drafts_are_one_text(k3):
    config, curve = k3.model.config, curve_of(k3.model)
    assert distinct_experts(config, Rows(drafts=1, acceptance=0.5), curve) == pytest.approx(26.51)
    both = distinct_experts(config, Rows(sequences=2, drafts=1, acceptance=0.5), curve)
    assert 26.51 < both < 2 * 26.51


def test_more_drafts_than_were_measured_are_refused(k3):
    with pytest.raises(OptionError, match=r"needs a curve of 13 tokens; it was measured up to 12"):
        distinct_experts(k3.model.config, Rows(drafts=12, acceptance=0.5), curve_of(k3.model))


def test_the_slowest_link_is_the_wall(k3):
    slow_disk = host(ram_bytes=64e9, disk_rate=1e9, memory_rate=400e9, cores=64)
    slow_memory = host(ram_bytes=3e12, disk_rate=1e9, memory_rate=10e9, cores=64)
    few_cores = host(ram_bytes=3e12, disk_rate=1e9, memory_rate=400e9, cores=1)
    found = [speed(k3, one, Rows(), context_tokens=4096) for one in (slow_disk, slow_memory, few_cores)]
    assert [one.wall.name for one in found] == ["disk", "host memory", "cores"]
    assert [one.regime for one in found] == ["partly pinned", "resident", "resident"]


def test_a_pass_takes_its_slowest_link_and_all_of_them_take_longer(k3):
    found = speed(
        k3, host(ram_bytes=64e9, disk_rate=6e9, memory_rate=80e9, cores=16), Rows(), context_tokens=4096
    )
    assert found.pass_s == max(link.seconds for link in found.links) < found.serial_s


def test_the_memory_of_a_host_reads_the_weights_once_and_is_written_by_the_disk(k3):
    found = speed(k3, host(ram_bytes=64e9, disk_rate=6e9, memory_rate=80e9), Rows(), context_tokens=4096)
    disk, memory = found.links
    moved = found.demand.weight_bytes + found.demand.sequence_bytes
    assert memory.num_bytes == pytest.approx(moved + disk.num_bytes)


def test_a_machine_without_a_known_disk_is_refused_where_it_would_read(k3):
    with pytest.raises(DoesNotFit, match=r"must come from a disk whose rate is not known"):
        speed(k3, host(ram_bytes=64e9), Rows(), context_tokens=4096)


def test_state_and_cache_that_have_no_room_are_refused(k3):
    with pytest.raises(DoesNotFit, match=r"state, cache and program take"):
        speed(k3, host(ram_bytes=8e9, disk_rate=6e9), Rows(sequences=100), context_tokens=4096)


def test_more_memory_never_makes_a_token_slower(k3):
    steps = ladder(
        k3, host(ram_bytes=64e9, disk_rate=6e9, memory_rate=80e9, cores=16), Rows(), context_tokens=4096
    )
    times = [step.pass_s for step in steps]
    assert len(times) > 8
    assert times == sorted(times, reverse=True)
    assert steps[-1].regime == "resident"


def test_more_accelerators_never_make_a_token_slower(k3, machines):
    steps = ladder(k3, machines.machine("b300-8"), Rows(), context_tokens=4096)
    times = [step.pass_s for step in steps]
    assert times == sorted(times, reverse=True)


@pytest.mark.parametrize("gigabytes", [2, 8, 32, 64, 100])
def test_bytes_of_a_token_are_those_of_the_engines_plan(k3, gigabytes):
    # within 2 %: alignment, narrow panels and the exact program are not in the arithmetic
    config = k3.model.config
    plan = make_plan(
        config,
        predicted_index(Path("nowhere"), config),
        ram_bytes=gigabytes * 10**9,
        program_bytes=program_bytes(k3),
        context_tokens=4096,
        chunk_tokens=1,
    )
    found = speed(k3, host(ram_bytes=gigabytes * 1e9, disk_rate=1e9), Rows(), context_tokens=4096)
    cold = found.links[0].num_bytes + found.tiers[0].hit_share * found.demand.routed_bytes
    assert cold == pytest.approx(plan.bytes_per_token, rel=0.02)


def test_blackwell_keeps_four_bits_and_hopper_takes_eight(k3, machines):
    forms = {name: form_on(k3, machines.accelerator(name)) for name in ("B300", "H100")}
    assert (forms["B300"].experts_as, forms["B300"].num_bytes) == ("MXFP4", 1_560_860_324_864)
    assert forms["H100"].experts_as == "FP8"
    assert forms["H100"].num_bytes == 2_722_740_830_208 + 1_560_860_324_864 - 1_446_456_066_048


@pytest.mark.parametrize(("name", "memory", "node"), [("B300", 6, 8), ("B200", 9, 16), ("H100", 36, 40)])
def test_the_real_checkpoint_needs_so_many_by_memory_and_by_node(k3, machines, name, memory, node):
    card = machines.accelerator(name)
    got = fit(form_on(k3, card).num_bytes, memory_bytes=card.memory_bytes.value, node=card.node)
    assert (got.by_memory, got.count) == (memory, node)


def test_a_format_can_be_asked_for_by_name(k3, machines):
    packed = form_on(k3, machines.accelerator("H100"), experts_as="MXFP4")
    assert packed.num_bytes == 1_560_860_324_864
    with pytest.raises(OptionError, match=r"there is no format INT3"):
        form_on(k3, machines.accelerator("H100"), experts_as="INT3")


def test_kimi_linear_is_bf16_everywhere(kimi_linear, machines):
    assert form_on(kimi_linear, machines.accelerator("H100")).num_bytes == 98_245_528_576


def test_accelerators_share_the_bytes_and_the_host_holds_what_is_left(k3, machines):
    found = speed(k3, machines.machine("h200-8"), Rows(), context_tokens=4096)
    assert [link.name for link in found.links] == ["host memory", "PCIe", "HBM", "NVLink", "tensor cores"]
    half = dataclasses.replace(machines.machine("b300-8"), count=16)
    one = speed(k3, machines.machine("b300-8"), Rows(), context_tokens=4096)
    assert speed(k3, half, Rows(), context_tokens=4096).pass_s == pytest.approx(one.pass_s / 2, rel=0.01)
