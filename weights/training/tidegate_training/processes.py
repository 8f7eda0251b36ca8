"""The processes that torchrun starts for one run: each trains a share of the lanes, and their gradients are summed.

Processes of one thread each synchronize only to sum gradients and updates. Threads of one process synchronize after every
operation, and wait there for any thread that the machine did not schedule.
"""

from __future__ import annotations

import datetime
import os

import torch
import torch.distributed as dist
from torch import Tensor

# Longer than a run is expected to be paused.
PATIENCE = datetime.timedelta(days=30)


class Processes:
    """This process's rank among the `size` processes of a run; without torchrun it is the only one."""

    def __init__(self) -> None:
        self.rank, self.size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        if self.size > 1 and not dist.is_initialized():
            dist.init_process_group("gloo", timeout=PATIENCE)

    @property
    def first(self) -> bool:
        """Whether this process writes files and evaluates."""
        return self.rank == 0

    def share(self, lanes: int) -> slice:
        """Returns this process's lanes; ValueError if the lanes cannot be shared equally."""
        if lanes % self.size:
            raise ValueError(f"train.lanes: must be a multiple of the {self.size} processes, found {lanes}")
        each = lanes // self.size
        return slice(self.rank * each, (self.rank + 1) * each)

    def add(self, tensors: list[Tensor]) -> None:
        """Replaces each tensor by its sum over all processes."""
        if self.size > 1:
            flat = torch.cat([x.flatten() for x in tensors])
            dist.all_reduce(flat)
            for x, total in zip(tensors, flat.split([x.numel() for x in tensors])):
                x.copy_(total.view_as(x))

    def join(self, x: Tensor | None) -> Tensor | None:
        """Concatenates the lanes of all processes. x: (lanes of this process, ...)"""
        if x is None or self.size == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)
