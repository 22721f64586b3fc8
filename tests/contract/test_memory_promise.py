"""The second promise: `--ram` is the whole process, and the limit that says so stands outside of it.

Two ways of enforcing it, each where it can be had (`pytest -rA` shows which applied): a memory
cgroup, which counts page cache too, with the model's files evicted from the page cache first; and
RLIMIT_DATA, which counts memory that is only reserved. Both are set to the budget itself.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.draft_layers import write_random
from tests.support.limits import Limited, evict, memory_group, run_limited
from twoends.checkpoint.tiny import write_tiny

IDS = "5,17,300,42,63,0,17,9"
NUM_NEW = 8
FAMILIES = ("kimi-k3", "kimi-linear")
MEGABYTE = 10**6
BIG_DISK_BYTES = 25 * 10**9

big = pytest.mark.skipif("not config.getoption('--big')", reason="--big was not given")
needs_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits are set as on Linux")
pytestmark = needs_linux


def words_of(directory: Path, *, ram_bytes: int | None, num_new: int = NUM_NEW, more=()) -> list[str]:
    words = ["run", str(directory), "--ids", IDS, "-n", str(num_new), "--json", *more]
    return words if ram_bytes is None else [*words, "--ram", str(ram_bytes)]


def run_within(
    limit: str, directory: Path, ram_bytes: int, record_property, *, timeout_s: float = 110, **options
) -> Limited:
    """A run whose budget is enforced from outside by the named limit, or a skip that says why not."""
    words = words_of(directory, ram_bytes=ram_bytes, **options)
    record_property("limit", limit)
    if limit == "RLIMIT_DATA":
        return run_limited(words, data_bytes=ram_bytes, timeout_s=timeout_s)
    with memory_group(ram_bytes) as group:
        if group is None:
            pytest.skip("no memory cgroup can be made here")
        if evict(directory):
            pytest.skip("this file system keeps its page cache, which the cgroup would not be charged for")
        done = run_limited(words, group=group, timeout_s=timeout_s)
    assert done.peak_bytes is not None
    assert done.peak_bytes <= ram_bytes
    return done


def assert_kept(found: dict, ram_bytes: int, limit: str) -> None:
    """The budget held, and the three books agree: what was planned, what was measured, what is held.

    Under RLIMIT_DATA the plan also has what is reserved and never touched, which no resident set shows.
    """
    assert found["ram_bytes"] == ram_bytes
    assert found["peak_rss_bytes"] <= ram_bytes
    rows = found["plan"]["rows"]
    total = sum(row["num_bytes"] for row in rows)
    assert total == found["plan"]["total_bytes"] <= ram_bytes
    tolerance = max(0.05 * total, 32 * MEGABYTE)
    assert found["peak_rss_bytes"] <= total
    if limit != "RLIMIT_DATA":
        assert total - found["peak_rss_bytes"] <= tolerance
    apart = ("program", "activations", "embedding rows")
    planned = sum(row["num_bytes"] for row in rows if row["name"] not in apart)
    assert planned - tolerance <= found["held_bytes"] <= planned


def same_answer(found: dict, expected: dict) -> None:
    for field in ("ids", "ids_digest", "logits_digest", "position_digests", "text"):
        assert found[field] == expected[field]


@pytest.fixture(scope="module")
def ample(nano_dirs):
    """family -> a run in ample memory without a limit, and the floor of that process."""
    return {
        family: run_limited(words_of(directory, ram_bytes=None)).json()
        for family, directory in nano_dirs.items()
    }


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("limit", ["cgroup", "RLIMIT_DATA"])
def test_a_model_runs_within_an_enforced_limit_with_the_same_bits(
    nano_dirs, ample, record_property, family, limit
):
    """A megabyte above the floor; reserved memory, which RLIMIT_DATA counts, lies 40 MB higher."""
    expected = ample[family]
    ram_bytes = expected["plan"]["floor_bytes"] + MEGABYTE
    if limit == "RLIMIT_DATA":
        ram_bytes += 40 * MEGABYTE
    found = run_within(limit, nano_dirs[family], ram_bytes, record_property).json()
    same_answer(found, expected)
    assert_kept(found, ram_bytes, limit)
    if limit == "cgroup":
        assert found["bytes_read"] > expected["bytes_read"], "a tight budget must stream"


@pytest.mark.parametrize("limit", ["cgroup", "RLIMIT_DATA"])
def test_a_draft_layer_is_within_the_budget(nano_checkpoints, ample, tmp_path, record_property, limit):
    """A layer ten times as large as the model, in a budget that is its floor and a megabyte."""
    checkpoint = nano_checkpoints["kimi-k3"]
    file = write_random(checkpoint, tmp_path / "draft", mlp_width=80_000)
    assert file.num_bytes > 40 * MEGABYTE
    more = ["--draft-model", str(tmp_path / "draft"), "--draft", "3"]
    probe = run_limited(words_of(checkpoint.directory, ram_bytes=None, more=more)).json()
    ram_bytes = probe["plan"]["floor_bytes"] + MEGABYTE
    if limit == "RLIMIT_DATA":
        ram_bytes += 40 * MEGABYTE
    found = run_within(limit, checkpoint.directory, ram_bytes, record_property, more=more).json()
    same_answer(found, ample["kimi-k3"])
    assert found["peak_rss_bytes"] <= found["plan"]["total_bytes"] <= ram_bytes
    row = next(row for row in found["plan"]["rows"] if row["name"] == "draft layer")
    assert file.num_bytes < row["num_bytes"] < 1.3 * file.num_bytes
    if limit == "cgroup":
        assert found["drafts"]["model"]["drafted"] > 0


def batch_within(limit: str, words: list, ram_bytes: int, *, timeout_s: float = 110) -> dict:
    words = ["batch", *map(str, words), "--ram", str(ram_bytes), "--json"]
    if limit == "RLIMIT_DATA":
        return run_limited(words, data_bytes=ram_bytes, timeout_s=timeout_s).json()
    with memory_group(ram_bytes) as group:
        if group is None:
            pytest.skip("no memory cgroup can be made here")
        done = run_limited(words, group=group, timeout_s=timeout_s)
    assert done.peak_bytes <= ram_bytes
    return done.json()


def write_requests(path: Path, count: int, max_tokens: int) -> None:
    bodies = [
        {"prompt": [5 + i, 17, 300][: 1 + i % 3], "max_tokens": max_tokens + i % 4} for i in range(count)
    ]
    lines = [
        {"custom_id": f"r{i}", "method": "POST", "url": "/v1/completions", "body": body}
        for i, body in enumerate(bodies)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def answers(path: Path) -> dict:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return {line["custom_id"]: line["response"]["body"]["choices"] for line in found}


@pytest.fixture(scope="module")
def batches(nano_dirs, tmp_path_factory):
    """family -> requests, their batches one by one and by eights without a limit, and the answers."""
    found = {}
    for family, directory in nano_dirs.items():
        place = tmp_path_factory.mktemp(f"batch-{family}")
        write_requests(place / "in", 20, 6)
        each = {}
        for sequences in (1, 8):
            words = ["batch", str(directory), str(place / "in"), str(place / f"out-{sequences}")]
            each[sequences] = run_limited([*words, "--sequences", str(sequences), "--json"]).json()
        found[family] = (place / "in", each[1], each[8], answers(place / "out-1"))
    return found


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("limit", ["cgroup", "RLIMIT_DATA"])
def test_a_batch_of_many_sequences_stays_within_an_enforced_limit(
    nano_dirs, batches, tmp_path, family, limit
):
    """A megabyte above the floor of eight sequences; reserved memory lies 40 MB higher."""
    requests, alone, ample, expected = batches[family]
    ram_bytes = ample["plan"]["floor_bytes"] + MEGABYTE + (40 * MEGABYTE if limit == "RLIMIT_DATA" else 0)
    words = [nano_dirs[family], requests, tmp_path / "tight", "--sequences", 8]
    found = batch_within(limit, words, ram_bytes)
    assert found["num_sequences"] == 8
    assert found["num_passes"] < alone["num_passes"] / 4
    assert_kept(found, ram_bytes, limit)
    assert answers(tmp_path / "tight") == expected


@pytest.mark.parametrize("limit", ["cgroup", "RLIMIT_DATA"])
def test_a_budget_beyond_an_outer_limit_is_refused_before_it_is_taken(nano_dirs, record_property, limit):
    """A long context makes the plan larger than the limit; the limit would have ended the process."""
    most = 150 * MEGABYTE
    record_property("limit", limit)
    words = words_of(nano_dirs["kimi-k3"], ram_bytes=2 * 10**9, more=["--context", "400000"])
    if limit == "RLIMIT_DATA":
        done = run_limited(words, data_bytes=most)
    else:
        with memory_group(most) as group:
            if group is None:
                pytest.skip("no memory cgroup can be made here")
            done = run_limited(words, group=group)
    assert done.code == 3
    assert "this process may take 150.0 MB at most" in done.stderr


@pytest.mark.parametrize("limit", ["cgroup", "RLIMIT_DATA"])
def test_the_limits_used_here_do_bite(limit):
    """A program that takes twice the limit ends; otherwise the tests above would prove nothing."""
    import resource

    most = 100 * MEGABYTE
    program = [sys.executable, "-c", f"x = bytearray({2 * most})\nfor i in range(0, len(x), 4096): x[i] = 1"]
    with memory_group(most) as group:
        if limit == "cgroup" and group is None:
            pytest.skip("no memory cgroup can be made here")

        def confine():
            if limit == "cgroup":
                group.enter()
            else:
                resource.setrlimit(resource.RLIMIT_DATA, (most, most))

        done = subprocess.run(program, preexec_fn=confine, capture_output=True, timeout=60)
    assert done.returncode != 0
    assert done.returncode == -9 or b"MemoryError" in done.stderr


def assert_bytes_as_planned(found: dict, num_passes: int) -> None:
    """Trunk to the byte, experts and all together to 1 %, alignment being under that at these sizes."""
    plan = found["plan"]
    trunk = plan["trunk_bytes_per_pass"] + (num_passes - 1) * plan["streamed_bytes_per_pass"]
    assert found["bytes_trunk"] == trunk
    misses = found["expert_requests"] - found["expert_hits"]
    experts = misses * plan["expert_bytes_per_request"]
    assert found["bytes_experts"] == pytest.approx(experts, rel=0.01)
    assert found["bytes_read"] == pytest.approx(trunk + experts, rel=0.01)


@pytest.fixture(scope="module")
def mini(tmp_path_factory):
    directory = tmp_path_factory.mktemp("mini") / "mini"
    write_tiny(directory, preset="mini", seed=0)
    yield directory
    shutil.rmtree(directory)


@pytest.fixture(scope="module")
def mini_ample(mini):
    return run_limited(words_of(mini, ram_bytes=3 * 10**9)).json()


@big
@pytest.mark.timeout(300)
@pytest.mark.parametrize("limit", ["cgroup", "RLIMIT_DATA"])
@pytest.mark.parametrize("policy", ["decayed", "lru"])
def test_mini_runs_in_a_tenth_of_its_size(mini, mini_ample, record_property, limit, policy):
    size = sum(path.stat().st_size for path in mini.iterdir())
    ram_bytes = size // 10
    found = run_within(
        limit, mini, ram_bytes, record_property, more=["--policy", policy], timeout_s=280
    ).json()
    same_answer(found, mini_ample)
    assert_kept(found, ram_bytes, limit)
    assert_bytes_as_planned(found, num_passes=NUM_NEW)


@big
@pytest.mark.timeout(600)
def test_eight_sequences_of_mini_read_a_third_of_the_bytes_of_one(mini, tmp_path):
    """In a tenth of its size: counted bytes of each new token, prompts included, and the same answers."""
    ram_bytes = sum(path.stat().st_size for path in mini.iterdir()) // 10
    write_requests(tmp_path / "in", 8, 12)
    found = {}
    for sequences in (1, 8):
        words = [mini, tmp_path / "in", tmp_path / str(sequences), "--sequences", sequences]
        found[sequences] = batch_within("cgroup", words, ram_bytes, timeout_s=280)
        assert_kept(found[sequences], ram_bytes, "cgroup")
    assert found[8]["bytes_per_new_token"] <= 0.35 * found[1]["bytes_per_new_token"]
    assert answers(tmp_path / "8") == answers(tmp_path / "1")


@pytest.fixture(scope="module")
def layers(tmp_path_factory):
    """Five layers of Kimi K3's true sizes; experts are holes in the files, which read as zeros."""
    directory = tmp_path_factory.mktemp("layer") / "layer"
    free = shutil.disk_usage(directory.parent).free
    if free < BIG_DISK_BYTES:
        pytest.skip(f"{free / 1e9:.0f} GB of disk are free; this takes {BIG_DISK_BYTES / 1e9:.0f} GB")
    write_tiny(directory, preset="layer", seed=0, sparse=True)
    yield directory
    shutil.rmtree(directory)


@big
@pytest.mark.timeout(1500)
def test_five_true_layers_of_kimi_k3_run_in_512_megabytes(layers, record_property):
    """The trunk of these five layers and the head is some twenty times the budget."""
    ram_bytes = 512 * MEGABYTE
    with memory_group(ram_bytes) as group:
        limit = "RLIMIT_DATA" if group is None else "cgroup"
    found = run_within(limit, layers, ram_bytes, record_property, num_new=3, timeout_s=600).json()
    assert_kept(found, ram_bytes, limit)
    assert_bytes_as_planned(found, num_passes=3)
    assert found["plan"]["trunk_bytes_per_pass"] > 10 * ram_bytes
    other = run_limited(
        words_of(layers, ram_bytes=3 * 10**9, num_new=3, more=["--chunk", "3"]), timeout_s=600
    ).json()
    same_answer(found, other)
