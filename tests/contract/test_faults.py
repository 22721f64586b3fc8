"""The fourth promise, from outside: whatever is wrong is named, with its exit code, and gives no token."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.checkpoints import tensor_place
from tests.support.opened import generate, opened
from tests.support.running import PROMPT
from twoends.checkpoint.safetensors import read_header
from twoends.cli.main import call
from twoends.engine.files import read_at
from twoends.engine.open import Checkpoint
from twoends.errors import ReadError
from twoends.generate.generator import Generator

ROOT = Path(__file__).resolve().parents[2]
IDS = "5,17,300,42"
FIRST, SECOND, LAST = (f"model-{i:05d}-of-000010.safetensors" for i in (1, 2, 10))


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """An index that another test has cached must not hide what this one breaks."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def model(nano_dirs, tmp_path):
    """A nano checkpoint that a test may damage."""
    return Path(shutil.copytree(nano_dirs["kimi-k3"], tmp_path / "model"))


def twoends(*words) -> subprocess.CompletedProcess:
    """The program as a user has it."""
    command = [sys.executable, "-m", "twoends", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT, check=False)


@pytest.fixture
def here(capsys):
    """The program in this process: the same edge, without a second interpreter."""

    def run(*words):
        code = call([str(word) for word in words], environment={})
        captured = capsys.readouterr()
        return subprocess.CompletedProcess(words, code, captured.out, captured.err)

    return run


def listing(directory: Path) -> dict:
    return {path: path.stat().st_size for path in sorted(directory.rglob("*")) if path.is_file()}


def refused(model: Path, *words, code: int, says: list[str], run=twoends) -> str:
    """Runs; the exit code, every word of the message, an empty stdout and an untouched directory."""
    before = listing(model.parent)
    done = run("run", model, "--ids", IDS, "-n", "3", *words)
    assert done.returncode == code, done.stderr
    for text in says:
        assert text in done.stderr
    assert done.stdout.strip() == ""
    assert "Traceback" not in done.stderr
    assert "defect" not in done.stderr
    assert listing(model.parent) == before
    return done.stderr


def test_a_truncated_shard_is_refused_with_its_name_and_its_missing_bytes(model):
    path = model / SECOND
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(size - 1234)
    message = refused(model, "--json", code=2, says=[SECOND, "1,234"])
    assert f"{size - 1234:,}" in message


def flip(path: Path, offset: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1 << bit
    path.write_bytes(data)


def test_a_flipped_byte_in_a_header_is_refused_with_the_files_name(model):
    """In the middle of a tensor's name: JSON still reads, but the model has no such tensor."""
    header = (model / SECOND).read_bytes()[:4000]
    flip(model / SECOND, header.index(b"self_attn.q_proj") + 12)
    refused(model, code=2, says=[SECOND])


@pytest.mark.parametrize("what", [b"BF16", b'"shape":[', b'"data_offsets":[', b'":{"dtype"', b"}", b","])
@pytest.mark.parametrize("bit", [0, 1, 4])
def test_any_flipped_byte_of_a_header_is_refused(model, here, what, bit):
    """Digits, marks and names; whatever it becomes, the file's name is in the message."""
    header_bytes = int.from_bytes((model / FIRST).read_bytes()[:8], "little")
    at = (model / FIRST).read_bytes().index(what, 8)
    offset = at + len(what) - (what[-1:] != b"[")
    assert offset < header_bytes
    flip(model / FIRST, offset, bit)
    refused(model, code=2, says=[FIRST], run=here)


@pytest.mark.parametrize("byte", range(8))
def test_any_flipped_byte_of_a_headers_length_is_refused(model, here, byte):
    flip(model / LAST, byte, 3)
    refused(model, code=2, says=[LAST], run=here)


def test_a_missing_shard_is_named(model):
    (model / SECOND).unlink()
    refused(model, code=2, says=[f"{SECOND} is missing", "model.safetensors.index.json"])


def test_an_index_that_names_an_absent_file_is_refused_with_that_name(model):
    index = model / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    name = next(iter(content["weight_map"]))
    content["weight_map"][name] = "model-00099-of-000010.safetensors"
    index.write_text(json.dumps(content))
    refused(model, code=2, says=["model-00099-of-000010.safetensors"])


@pytest.mark.parametrize("name", [SECOND, "config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("content", [b"", b"\x00" * 100, b"<html>404</html>"])
def test_an_empty_or_foreign_file_is_named(model, here, name, content):
    (model / name).write_bytes(content)
    refused(model, code=2, says=[name], run=here)


# Small tensors, matrices, experts, the ends: a NaN anywhere must come out as NotSound, never as a token.
POISONED = [
    "layers.0.input_layernorm.weight",
    "layers.1.self_attn.q_conv1d.weight",
    "layers.2.self_attn.A_log",
    "layers.2.self_attn.dt_bias",
    "layers.3.self_attn.kv_b_proj.weight",
    "layers.4.block_sparse_moe.gate.weight",
    "layers.5.block_sparse_moe.gate.e_score_correction_bias",
    "layers.8.block_sparse_moe.routed_expert_up_proj.weight",
    "layers.8.block_sparse_moe.shared_experts.down_proj.weight",
    "model.norm.weight",
    "lm_head.weight",
]
# The high halves of two NaNs and of infinity, the same in BF16 and F32.
VALUES = {"nan": b"\xc0\x7f", "negative nan": b"\x81\xff", "infinity": b"\x80\x7f"}


def poison(model: Path, ending: str, value: bytes) -> None:
    """Writes a value over the first element of a tensor."""
    path, begin, dtype = tensor_place(model, ending)
    with path.open("r+b") as file:
        file.seek(begin)
        file.write(value if dtype == "BF16" else b"\0\0" + value)


@pytest.mark.parametrize("ending", POISONED)
def test_a_weight_that_is_not_a_number_gives_no_token(model, here, ending):
    poison(model, ending, VALUES["nan"])
    refused(model, "--json", code=4, says=["not finite"], run=here)


@pytest.mark.parametrize("value", ["negative nan", "infinity"])
def test_no_kind_of_it_gives_a_token(model, here, value):
    poison(model, "layers.3.self_attn.o_proj.weight", VALUES[value])
    refused(model, "--json", code=4, says=["not finite"], run=here)


def test_a_scale_that_is_not_a_number_gives_no_token_from_outside(model):
    """Every w2 scale of one layer is 255: whichever experts are chosen, they are not sound."""
    for path in sorted(model.glob("*.safetensors")):
        header = read_header(path)
        with path.open("r+b") as file:
            for name, begin, end in zip(header.names, header.begins, header.ends, strict=True):
                if ".layers.6." in name and name.endswith("w2.weight_scale"):
                    file.seek(int(begin))
                    file.write(b"\xff" * int(end - begin))
    refused(model, "--json", code=4, says=["not finite"])


def test_a_file_that_shrinks_after_it_was_opened_is_a_read_error(model):
    """Between the headers and the weights: zeros or old bytes must not take the place of the lost ones."""
    checkpoint = Checkpoint.open(model)
    path, begin, _ = tensor_place(model, "lm_head.weight")
    with path.open("r+b") as file:
        file.truncate(begin + 5000)
    with opened(checkpoint) as engine, pytest.raises(ReadError) as caught:
        generate(Generator(engine, list(PROMPT), chunk=64), 3)
    assert path.name in caught.value.headline
    assert caught.value.exit_code == 1


@pytest.mark.parametrize("budget", ["floor", "ample"])
def test_a_device_that_fails_in_the_middle_of_a_pass_names_file_and_range(nano_checkpoints, budget):
    checkpoint = nano_checkpoints["kimi-k3"]
    broken = checkpoint.index.tensor(4, "o_proj").segment

    def read(fd, buffer, offset):
        count = read_at(fd, buffer, offset)
        if offset <= broken.offset < offset + count and len(told) < 1:
            told.append(offset)
            raise OSError(5, "Input/output error")
        return count

    told: list[int] = []
    with opened(checkpoint, budget=budget, read=read) as engine, pytest.raises(ReadError) as caught:
        generate(Generator(engine, list(PROMPT), chunk=64), 3)
    assert "Input/output error" in caught.value.headline
    assert [row[0] for row in caught.value.evidence] == ["file", "range"]


@pytest.fixture
def session(model, tmp_path):
    path = tmp_path / "chat.session"
    done = twoends("run", model, "--ids", IDS, "-n", "2", "--save", path)
    assert done.returncode == 0, done.stderr
    return path


def test_a_damaged_or_foreign_session_is_refused(model, session, nano_dirs, tmp_path, here):
    whole = session.read_bytes()
    flip(session, len(whole) // 2)
    refused(model, "--load", session, code=2, says=["chat.session is damaged", "checksum"])
    session.write_bytes(whole[:-10])
    refused(model, "--load", session, code=2, says=["chat.session is damaged"], run=here)
    session.write_bytes(whole)
    other = Path(shutil.copytree(nano_dirs["kimi-linear"], tmp_path / "other"))
    refused(other, "--load", session, code=2, says=["chat.session was not made by this model"], run=here)


def test_a_full_disk_while_saving_exits_3_and_keeps_the_old_session(model, session, tmp_path):
    """A file system that is full but for a few kilobytes, where root may mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    try:
        mounted = subprocess.run(mount, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("this system has no mount command")
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    try:
        old = disk / "s"
        old.write_bytes(b"an older session")
        done = twoends("run", model, "--ids", IDS, "-n", "2", "--save", old, "--json")
        assert done.returncode == 3
        assert "the session needs" in done.stderr
        assert len(json.loads(done.stdout)["ids"]) == 2, "what was made is not lost with the session"
        assert [path.name for path in disk.iterdir()] == ["s"]
        assert old.read_bytes() == b"an older session"
    finally:
        subprocess.run(["umount", str(disk)], check=True)
