"""Checkpoints opened, laid out otherwise than the releases, and damaged."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from twoends.checkpoint.config import read_config
from twoends.checkpoint.index import CheckpointIndex
from twoends.checkpoint.layout import ShardPlan, checkpoint_plans, plan_shard
from twoends.checkpoint.presets import preset_config
from twoends.checkpoint.safetensors import read_header
from twoends.checkpoint.synthetic import SyntheticWeights
from twoends.checkpoint.writer import write_checkpoint

_PART = re.compile(r"\.experts\.(\d+)\.(w\d)\.")


def open_index(directory: Path, **options: int) -> CheckpointIndex:
    """The index of a checkpoint by the config that lies in it."""
    return CheckpointIndex.open(directory, read_config(directory), **options)


def write_split_nano(directory: Path, whole: Path, *, family: str, seed: int) -> Path:
    """The nano checkpoint `whole` again, with the w2 of every odd expert and the w3 of every third in
    another shard than the rest of it. A family with one shard gets a second one."""
    config = preset_config("nano", family=family)
    plans = list(checkpoint_plans(config, "mxfp4" if family == "kimi-k3" else "bf16"))
    kept = [[] for _ in plans]
    moved = [[] for _ in plans]
    for place, plan in enumerate(plans):
        for tensor in plan.tensors:
            (moved if _is_moved(tensor.name) else kept)[place].append(tensor)
    if len(plans) == 1:
        files = [kept[0], moved[0]]
    else:
        files = [[*kept[place], *moved[place - 1]] for place in range(len(plans))]
    names = [f"model-{i + 1:05d}-of-{len(files):06d}.safetensors" for i in range(len(files))]
    split: list[ShardPlan] = [plan_shard(name, file) for name, file in zip(names, files, strict=True)]
    write_checkpoint(directory, split, SyntheticWeights(config, seed=seed).pieces)
    for path in whole.iterdir():
        if path.suffix != ".safetensors" and "index" not in path.name:
            shutil.copy(path, directory)
    return directory


def _is_moved(name: str) -> bool:
    match = _PART.search(name)
    if match is None:
        return False
    expert, part = int(match.group(1)), match.group(2)
    return (part == "w2" and expert % 2 == 1) or (part == "w3" and expert % 3 == 0)


def tensor_place(directory: Path, ending: str) -> tuple[Path, int, str]:
    """(file, first byte, dtype) of the one tensor whose name has this ending."""
    found = []
    for path in sorted(directory.glob("*.safetensors")):
        header = read_header(path)
        found += [(path, header, at) for at, name in enumerate(header.names) if name.endswith(ending)]
    assert len(found) == 1, f"{len(found)} tensors end in {ending}"
    path, header, at = found[0]
    return path, int(header.begins[at]), header.dtypes[at]
