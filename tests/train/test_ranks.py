"""Several ranks: a run begun at two goes on at one and at four, and learns what one rank learns."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

torch = pytest.importorskip("torch", reason="the training half needs torch (pip install 'twoends[train]')")

from tests.train.models import noise, tiny_recipe  # noqa: E402
from twoends.errors import OptionError  # noqa: E402
from twoends.train.loop import Run  # noqa: E402
from twoends.train.ranks import Ranks  # noqa: E402

ROOT = Path(__file__).parents[2]
WORKER = """
import json, sys
from pathlib import Path
from tests.train.models import noise, tiny_recipe
from twoends.train.loop import Run
from twoends.train.ranks import join_ranks, leave_ranks
ranks = join_ranks()
recipe = tiny_recipe(batch_rows=4, micro_rows=1, steps=9, **json.loads(sys.argv[3]))
run = Run(recipe, noise(), Path(sys.argv[1]), ranks=ranks)
if sys.argv[2] == "resume":
    run.restore()
else:
    for _ in range(2):
        run.step()
    run.save()
before = run.evaluate()
record = run.step()
if ranks.is_first:
    after = run.evaluate()["noise"]
    print(json.dumps({"before": before["noise"], "next": record["loss_nats"], "after": after}))
else:
    run.evaluate()
leave_ranks(ranks)
"""


def _ranks(count: int, folder: Path, what: str, changes: dict[str, bool]) -> dict[str, float]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {
        "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    running = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(folder), what, json.dumps(changes)],
            env=environment | {"RANK": str(rank)}, cwd=ROOT, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank in range(count)
    ]  # fmt: skip
    try:
        told = [process.communicate(timeout=100) for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0] * count, told[0][1][-3000:]
    found: dict[str, float] = json.loads(told[0][0].splitlines()[-1])
    return found


class _Begun(NamedTuple):
    """A run that two ranks began: how its recipe differs, its folder, and what they found."""

    changes: dict[str, bool]
    folder: Path
    found: dict[str, float]


@pytest.fixture(scope="module", params=[{}, {"mtp": True, "recompute": True}], ids=["plain", "mtp-recompute"])
def two(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> _Begun:
    folder = tmp_path_factory.mktemp("two")
    return _Begun(request.param, folder, _ranks(2, folder, "begin", request.param))


def _one(folder: Path, changes: dict[str, bool]) -> Run:
    return Run(tiny_recipe(batch_rows=4, micro_rows=1, steps=9, **changes), noise(), folder)


@pytest.mark.timeout(300)
def test_two_ranks_learn_what_one_learns(two: _Begun, tmp_path: Path) -> None:
    run = _one(tmp_path, two.changes)
    for _ in range(2):
        run.step()
    # Gradients are binary32 sums in another order, and Muon gives small singular values full length.
    assert run.evaluate()["noise"] == pytest.approx(two.found["before"], rel=1e-3)


@pytest.mark.timeout(300)
def test_a_run_of_two_ranks_goes_on_at_one(two: _Begun) -> None:
    run = _one(two.folder, two.changes)
    run.restore()
    assert run.done_steps == 2
    assert run.evaluate()["noise"] == two.found["before"]
    assert run.step()["loss_nats"] == pytest.approx(two.found["next"], rel=1e-6)
    assert run.evaluate()["noise"] == pytest.approx(two.found["after"], rel=1e-3)


@pytest.mark.timeout(300)
def test_a_run_of_two_ranks_goes_on_at_four(two: _Begun) -> None:
    four = _ranks(4, two.folder, "resume", two.changes)
    assert four["before"] == two.found["before"]
    assert four["next"] == pytest.approx(two.found["next"], rel=1e-6)
    assert four["after"] == pytest.approx(two.found["after"], rel=1e-3)


def test_rows_that_ranks_cannot_share_evenly_are_refused() -> None:
    ranks = Ranks(rank=1, world=3, device=torch.device("cpu"), reason="a test")
    assert ranks.rows(6) == slice(2, 4)
    with pytest.raises(OptionError, match="batch_rows is 4; 3 ranks"):
        ranks.rows(4)
