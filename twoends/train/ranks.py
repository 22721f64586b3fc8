"""The processes of one run: who this is, its device, and the few sums that all of them make together.

One process needs none of it. Started by torchrun (or any launcher that sets RANK and WORLD_SIZE), each
rank holds its share of every parameter (FSDP2) and computes its share of every step's rows.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from twoends.errors import OptionError
from twoends.train.model import KimiK3


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """This process among `world`; `reason` says why it computes on `device`."""

    rank: int
    world: int
    device: torch.device
    reason: str

    @property
    def is_first(self) -> bool:
        """Whether this process writes what one process must write."""
        return self.rank == 0

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The group of all ranks; None where there is only one."""
        return dist.group.WORLD if self.world > 1 else None

    def rows(self, batch_rows: int) -> slice:
        """This rank's rows of a step. Raises OptionError where they can't be shared out evenly."""
        if batch_rows % self.world:
            raise OptionError(
                f"batch_rows is {batch_rows}; {self.world} ranks can't have equal shares of it.",
                remedies=["Choose a number of ranks that divides batch_rows."],
            )
        share = batch_rows // self.world
        return slice(self.rank * share, (self.rank + 1) * share)

    def total(self, value: torch.Tensor) -> float:
        """The sum of a scalar over all ranks."""
        if self.world > 1:
            dist.all_reduce(value)
        return value.item()

    def agree(self, flag: bool) -> bool:
        """Whether any rank says so: a signal reaches one process, and all must stop at the same step."""
        if self.world == 1:
            return flag
        value = torch.tensor([flag], dtype=torch.int32, device=self.device)
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return bool(value.item())

    def wait(self) -> None:
        """Until all ranks are here."""
        if self.world > 1:
            dist.barrier()

    def shard(self, model: KimiK3) -> None:
        """FSDP2: each layer's parameters are gathered when it runs, the rest with the whole model."""
        if self.world == 1:
            return
        mesh = init_device_mesh(self.device.type, (self.world,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)

    def sync_gradients(self, model: KimiK3, now: bool) -> None:
        """Whether the next backward pass shares gradients; only a step's last part needs to."""
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(now)


def one_rank() -> Ranks:
    """This process alone."""
    if torch.cuda.is_available():
        return Ranks(rank=0, world=1, device=torch.device("cuda", 0), reason="a CUDA device is there")
    return Ranks(rank=0, world=1, device=torch.device("cpu"), reason="no CUDA device is there")


def join_ranks() -> Ranks:
    """The ranks that the environment tells of (torchrun), or this process alone."""
    alone, world = one_rank(), int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        return alone
    rank, device = int(os.environ["RANK"]), alone.device
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return Ranks(rank=rank, world=world, device=device, reason=alone.reason)


def leave_ranks(ranks: Ranks) -> None:
    """The end of `join_ranks`."""
    if ranks.world > 1:
        dist.destroy_process_group()
