"""Snapshots of a run: torch.distributed.checkpoint, whole or not at all, readable at any number of ranks.

SNAPSHOTS/step-00000120/
    *.distcp, .metadata     parameters, buffers and optimiser state under their names, each a whole tensor
    loss.jsonl              the records of all steps so far
    whole.json              written last: the step and the recipe; a folder without it is no snapshot

A snapshot is written beside its place and renamed; older ones go when it stands.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from twoends.errors import CheckpointError, OptionError
from twoends.train.ranks import Ranks

SNAPSHOTS = "snapshots"
_MARKER, _LOSSES = "whole.json", "loss.jsonl"


def newest_snapshot(out_dir: Path) -> Path | None:
    """The whole snapshot of the highest step in a run's folder."""
    whole = sorted(path.parent for path in (out_dir / SNAPSHOTS).glob(f"step-*/{_MARKER}"))
    return whole[-1] if whole else None


def snapshot_to_resume(out_dir: Path) -> Path:
    """The newest whole snapshot. Raises OptionError where there is none."""
    path = newest_snapshot(out_dir)
    if path is None:
        raise OptionError(f"there is no snapshot to resume from in {out_dir}.")
    return path


def refuse_earlier_run(out_dir: Path) -> None:
    """Raises OptionError where a run that isn't resumed would write over another's snapshots."""
    if newest_snapshot(out_dir) is not None:
        raise OptionError(
            f"{out_dir} holds the snapshot of an earlier run.",
            remedies=["Go on with it:  add --resume", "Or choose another --out."],
        )


def write_snapshot(
    out_dir: Path,
    *,
    recipe: dict[str, Any],
    done_steps: int,
    losses: list[dict[str, Any]],
    model: nn.Module,
    optimiser: torch.optim.Optimizer,
    ranks: Ranks,
) -> Path:
    """Write a snapshot of this step and remove the others; all ranks call it together.

    `recipe` is what the run follows, by section and key.
    """
    folder = out_dir / SNAPSHOTS
    path = folder / f"step-{done_steps:08d}"
    partial = path.with_name(path.name + ".partial")
    if ranks.is_first:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    ranks.wait()
    with _one_rank_is_fine():
        dcp.save(_state(model, optimiser), checkpoint_id=partial, no_dist=ranks.world == 1)
    if ranks.is_first:
        lines = "".join(json.dumps(record) + "\n" for record in losses)
        (partial / _LOSSES).write_text(lines, encoding="ascii")
        marker = {"done_steps": done_steps, "ranks": ranks.world, "recipe": recipe}
        (partial / _MARKER).write_text(json.dumps(marker), encoding="ascii")
        for name in (_LOSSES, _MARKER):
            _flush(partial / name)
        _flush(partial)
        shutil.rmtree(path, ignore_errors=True)
        partial.rename(path)
        _flush(folder)
        for other in folder.iterdir():
            if other != path:
                shutil.rmtree(other)
    ranks.wait()
    return path


def read_snapshot(
    path: Path,
    *,
    recipe: dict[str, Any],
    same: tuple[str, ...],
    model: nn.Module,
    optimiser: torch.optim.Optimizer,
    ranks: Ranks,
) -> tuple[int, list[dict[str, Any]]]:
    """Fill model and optimiser; gives the steps done and their records.

    Raises OptionError for a snapshot of another run: one whose recipe differs in a section of `same`, or in
    a key of [train] that it names.
    """
    marker = json.loads((path / _MARKER).read_text(encoding="ascii"))
    theirs, ours = marker["recipe"], json.loads(json.dumps(recipe))
    for name in same:
        if name in ours and theirs.get(name) != ours[name]:
            raise OptionError(f"the snapshot {path} was made by a recipe with another [{name}].")
        if name not in ours and theirs["train"][name] != ours["train"][name]:
            raise OptionError(f"the snapshot {path} was made with {name} = {theirs['train'][name]!r}.")
    _make_room(path, model, optimiser)
    state = _state(model, optimiser)
    with _one_rank_is_fine():
        dcp.load(state, checkpoint_id=path, no_dist=ranks.world == 1)
    for index, parameter in _named(model, optimiser):
        moments = optimiser.state[parameter]
        for name in list(moments):
            moments[name] = state[f"optimiser.{index}.{name}"]
    losses = [json.loads(line) for line in (path / _LOSSES).read_text(encoding="ascii").splitlines()]
    return marker["done_steps"], losses


@contextlib.contextmanager
def _one_rank_is_fine() -> Iterator[None]:
    """torch warns of a save in one process, which is what one rank means."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _named(model: nn.Module, optimiser: torch.optim.Optimizer) -> list[tuple[str, torch.nn.Parameter]]:
    held = {id(p) for group in optimiser.param_groups for p in group["params"]}
    return [(name, p) for name, p in model.named_parameters() if id(p) in held]


def _state(model: nn.Module, optimiser: torch.optim.Optimizer) -> dict[str, Any]:
    """Every tensor of the run by name; the same tensors, not copies."""
    state: dict[str, Any] = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for name, parameter in _named(model, optimiser):
        for key, value in optimiser.state.get(parameter, {}).items():
            state[f"optimiser.{name}.{key}"] = value
    return state


def _make_room(path: Path, model: nn.Module, optimiser: torch.optim.Optimizer) -> None:
    """Optimiser state of the shapes that the snapshot tells of, to be loaded into."""
    stored = FileSystemReader(path).read_metadata().state_dict_metadata
    parameters = dict(_named(model, optimiser))
    for key, about in stored.items():
        if not key.startswith("optimiser."):
            continue
        name, _, moment = key.removeprefix("optimiser.").rpartition(".")
        if name not in parameters or not isinstance(about, TensorStorageMetadata):
            raise CheckpointError(f"the snapshot {path} holds {key}, which this run has no place for.")
        parameter, dtype = parameters[name], about.properties.dtype
        if tuple(about.size) == tuple(parameter.shape):
            room = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
        else:
            # A step count stays on the CPU, where the optimisers keep it.
            room = torch.zeros(about.size, dtype=dtype)
        optimiser.state[parameter][moment] = room


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
