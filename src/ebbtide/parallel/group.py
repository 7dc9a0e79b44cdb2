"""Collectives over all ranks of a torch process group, by gloo on the host; a single process is a group of one."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")

# Versions after torch 2.11 have it under another name, and warn about the old one.
all_gather_single: Callable[..., object] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Gathers a tensor of each rank into one."""


class Group:
    """A separate process group: its messages mix neither with what a GPU has queued nor with those of other
    groups."""

    def __init__(self, timeout: timedelta) -> None:
        self._group: Any = None
        self.rank, self.size = 0, 1
        if dist.is_available() and dist.is_initialized():
            self._group = dist.new_group(backend="gloo", timeout=timeout)
            self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def all_gather(self, mine: T) -> list[T]:
        """Every rank's value, on all ranks; when it returns, all ranks have entered it."""
        if self.size == 1:
            return [mine]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, mine, group=self._group)
        return found

    def broadcast(self, value: T) -> T:
        """Rank 0's value, on all ranks."""
        if self.size == 1:
            return value
        sent = [value]
        dist.broadcast_object_list(sent, 0, group=self._group)
        return sent[0]

    def broadcast_tensor(self, tensor: Tensor, source: int) -> None:
        """Fills a tensor on the host with that of rank `source`."""
        if self.size > 1:
            dist.broadcast(tensor, source, group=self._group)

    def all_sum(self, values: Any) -> Any:
        """The elementwise sum of numbers, or lists of them, over all ranks in float64."""
        table = torch.tensor(values, dtype=torch.float64)
        if self.size > 1:
            dist.all_reduce(table, group=self._group)
        return table.tolist()

    def sum_tensor(self, tensor: Tensor) -> None:
        """Replaces a tensor on the host by its sum over all ranks."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self._group)

    def all_max(self, values: list[float]) -> list[float]:
        """The elementwise maximum over all ranks."""
        table = torch.tensor(values, dtype=torch.float64)
        if self.size > 1:
            dist.all_reduce(table, dist.ReduceOp.MAX, group=self._group)
        return table.tolist()

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier(self._group)
