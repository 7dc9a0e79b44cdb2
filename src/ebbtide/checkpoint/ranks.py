"""The processes that save and load together: one, or those of a torch process group."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor


class Ranks:
    """A group of its own, so that what a save says in the background never mixes with what training says."""

    def __init__(self, timeout_minutes: float) -> None:
        self._group: Any = None
        self.rank, self.count = 0, 1
        if dist.is_available() and dist.is_initialized():
            self._group = dist.new_group(backend="gloo", timeout=timedelta(minutes=timeout_minutes))
            self.rank, self.count = dist.get_rank(), dist.get_world_size()

    def gather(self, mine: Any) -> list[Any]:
        """What each has, on all of them; all have come here when it returns."""
        found: list[Any] = [mine]
        if self.count > 1:
            found = [None] * self.count
            dist.all_gather_object(found, mine, group=self._group)
        return found

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Fills a tensor on the host with that of a rank."""
        if self.count > 1:
            dist.broadcast(tensor, source, group=self._group)
