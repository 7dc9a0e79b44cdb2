"""The entries of a checkpoint: the tensors of each rank by name, size and dtype, and which rank writes them."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ebbtide.parallel.dtensor import Region


@dataclass(frozen=True)
class TensorEntry:
    """A tensor's name (`model.` or `optimizer.`, and its own name), size and dtype; or those of a rank's shard."""

    name: str
    size: torch.Size
    dtype: torch.dtype
    part_of: Region | None = None
    """The shard's region in the whole tensor; None where the tensor is not sharded."""

    @property
    def bytes(self) -> int:
        return self.size.numel() * self.dtype.itemsize

    def empty(self) -> Tensor:
        return torch.empty(self.size, dtype=self.dtype)

    def within(self, memory: mmap.mmap, start: int) -> Tensor:
        """The tensor over a part of some memory. Its storage is exactly as large as the tensor: torch copies any other
        tensor before it writes it, and keeps the copy until the file is complete."""
        if not self.bytes:
            return self.empty()
        return torch.frombuffer(memory, dtype=self.dtype, count=self.size.numel(), offset=start).view(self.size)


@dataclass(frozen=True)
class WriteShare:
    """A rank's share of the write. With `parallel`, replicated tensors are divided among the ranks; without, rank 0
    writes them."""

    rank: int = 0
    count: int = 1
    parallel: bool = True


RankEntries = Sequence[Sequence[TensorEntry]]
"""The entries of each rank."""
