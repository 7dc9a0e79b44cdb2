"""The communication of the ranks that train one policy: work shares, collectives over figures and objects, gradient
norms.

A run of one process has a `Comm`, whose collectives do nothing; each of several has a `DistributedComm`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore, Store

from ebbtide.config.parallel import ParallelConfig
from ebbtide.parallel.costs import describe_ranks
from ebbtide.parallel.dtensor import is_sharded
from ebbtide.parallel.group import Group, all_gather_single
from ebbtide.parallel.partition import balance
from ebbtide.progress import WorkAbandoned

T = TypeVar("T")
R = TypeVar("R")

Norms = list[tuple[int, float]]
"""Pairs (number of a trained parameter, norm of its gradient)."""


class Comm:
    """The communication of a single process: there is no other rank, so each collective returns its input."""

    rank, size = 0, 1
    local_size = 1
    """The number of ranks on this machine."""
    shards = 1
    """The number of shards of the weights, gradients and optimizer state; each rank has one."""
    mesh: DeviceMesh | None = None

    def __enter__(self) -> Comm:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Leaves the process group, if there is one."""

    @property
    def is_main(self) -> bool:
        """Whether this rank prints, and writes the run's files."""
        return self.rank == 0

    def describe(self) -> str:
        """The ranks in one sentence, for the user."""
        return "1 rank, with the whole model"

    def load_device(self, device: torch.device) -> torch.device:
        """The device to load the whole model on before it is sharded."""
        return device

    # Work

    def local_share(self, sizes: Sequence[int]) -> list[int]:
        """The indices of this rank's pieces of work, balanced by size over the data-parallel ranks."""
        return list(range(len(sizes)))

    def map_partitioned(
        self, items: Sequence[T], sizes: Sequence[int], work: Callable[[list[T]], Sequence[R]]
    ) -> list[R]:
        """The results of `work` on all items, in order: every rank does its share, which may be empty, and gets all
        results. If one rank raises `WorkAbandoned`, all do."""
        return list(work(list(items)))

    def max_rounds(self, mine: int) -> int:
        """The most passes that any rank has to make: as the weights are sharded, all ranks take part in all passes."""
        return mine

    # Figures

    def all_gather(self, mine: T) -> list[T]:
        """Every rank's value, on all ranks."""
        return [mine]

    def all_gather_dict(self, found: dict[int, Tensor], like: Tensor) -> dict[int, Tensor]:
        """The union of all ranks' results [rows, ...], by piece of work. They differ from `like`, which a rank without
        results has as well, in the number of rows alone."""
        return found

    def all_sum(self, values: list[float]) -> list[float]:
        """The elementwise sum over the data-parallel ranks."""
        return values

    def all_max(self, values: list[float]) -> list[float]:
        """The elementwise maximum over all ranks."""
        return values

    def any(self, mine: bool) -> bool:
        """Whether `mine` is true on any rank."""
        return mine

    def broadcast(self, value: T) -> T:
        """Rank 0's value, on all ranks."""
        return value

    def global_norms(self, norms: Norms, weights: Sequence[nn.Parameter]) -> Norms:
        """The norms of whole gradients, from those of the shards on this rank."""
        return norms


class DistributedComm(Comm):
    """The processes of a torch process group: a mesh of `replicate` x `shard` x `tensor`."""

    def __init__(
        self, parallel: ParallelConfig, device: torch.device, store: Store, rank: int, size: int, timeout: timedelta
    ) -> None:
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        store = PrefixStore("train", store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
        self.rank, self.size = rank, size
        # LOCAL_WORLD_SIZE counts the ranks that only generate as well.
        self.local_size = min(size, int(os.environ.get("LOCAL_WORLD_SIZE", size)))
        self.data = self.size // parallel.tensor
        shape = (parallel.replicate, self.data // parallel.replicate, parallel.tensor)
        self.mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard", "tensor"))
        self.shards = self.mesh.size(1) * self.mesh.size(2)
        self._sizes = f"data {self.data}, tensor {parallel.tensor}, replicate {parallel.replicate}"
        self._data_rank, self._tensor_rank = divmod(self.rank, parallel.tensor)
        # A separate group on the host: figures and texts must not wait for what a GPU has queued.
        self._group = Group(timeout)
        self._counted: list[bool] = []
        """For each trained parameter, whether this rank counts the norm of its shard."""

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._group.barrier()  # no rank leaves while another still communicates with it
            dist.destroy_process_group()

    def describe(self) -> str:
        return f"{describe_ranks(self.size, self.shards)}: {self._sizes}"

    def load_device(self, device: torch.device) -> torch.device:
        return torch.device("cpu") if self.shards > 1 else device

    # Work

    def local_share(self, sizes: Sequence[int]) -> list[int]:
        return balance(sizes, self.data)[self._data_rank]

    def map_partitioned(
        self, items: Sequence[T], sizes: Sequence[int], work: Callable[[list[T]], Sequence[R]]
    ) -> list[R]:
        shares = balance(sizes, self.size)
        try:
            mine: list[R] | None = list(work([items[index] for index in shares[self.rank]]))
        except WorkAbandoned:
            mine = None  # the others wait in the all-gather below
        done: dict[int, R] = {}
        for share, results in zip(shares, self.all_gather(mine), strict=True):
            if results is None:
                raise WorkAbandoned
            done |= zip(share, results, strict=True)
        return [done[index] for index in range(len(items))]

    def max_rounds(self, mine: int) -> int:
        return int(self.all_max([float(mine)])[0])

    # Figures

    def all_gather(self, mine: T) -> list[T]:
        return self._group.all_gather(mine)

    def all_gather_dict(self, found: dict[int, Tensor], like: Tensor) -> dict[int, Tensor]:
        rows = self.all_gather({index: len(tensor) for index, tensor in found.items()})
        most = max(sum(counts.values()) for counts in rows)
        sent = like.new_zeros((most, *like.shape[1:]))
        if found:
            torch.cat([*found.values()], out=sent[: sum(map(len, found.values()))])
        received = like.new_empty((self.size, *sent.shape))
        all_gather_single(received.flatten().view(torch.uint8), sent.flatten().view(torch.uint8))
        union: dict[int, Tensor] = {}
        for part, counts in zip(received, rows, strict=True):
            union |= zip(counts, torch.split(part[: sum(counts.values())], [*counts.values()]), strict=True)
        return union

    def all_sum(self, values: list[float]) -> list[float]:
        # Tensor-parallel ranks work on the same samples: one of them counts.
        total: list[float] = self._group.all_sum(values if self._tensor_rank == 0 else [0.0] * len(values))
        return total

    def all_max(self, values: list[float]) -> list[float]:
        return self._group.all_max(values)

    def any(self, mine: bool) -> bool:
        return self.all_max([float(mine)])[0] > 0

    def broadcast(self, value: T) -> T:
        return self._group.broadcast(value)

    def global_norms(self, norms: Norms, weights: Sequence[nn.Parameter]) -> Norms:
        if self.size == 1:
            return norms
        self._counted = self._counted or [self._counts(weight) for weight in weights]
        squares, seen = ([0.0] * len(weights) for _ in range(2))
        for number, norm in norms:
            seen[number] = 1.0
            if self._counted[number]:
                squares[number] += norm * norm
        squares, seen = self._group.all_sum([squares, seen])
        return [(number, math.sqrt(squares[number])) for number, count in enumerate(seen) if count]

    def _counts(self, weight: Tensor) -> bool:
        """Whether this rank counts its shard of a weight: one of the ranks that have the same shard does."""
        assert self.mesh is not None
        cut: set[str] = set()
        if is_sharded(weight):
            names = weight.device_mesh.mesh_dim_names or ()
            cut = {name for name, placed in zip(names, weight.placements, strict=True) if not placed.is_replicate()}
        coordinates = zip(self.mesh.mesh_dim_names or (), self.mesh.get_coordinate() or (), strict=True)
        return all(name in cut or coordinate == 0 for name, coordinate in coordinates)
