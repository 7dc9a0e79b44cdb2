"""The ranks of a run, and what they say to each other. A run of one process has a `World` that says nothing; `Ranks` are those of a torch process group."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from ebbtide.cluster.deal import deal
from ebbtide.cluster.link import Link
from ebbtide.config.tree import Cluster, Config
from ebbtide.errors import Stopped, UserError
from ebbtide.memory.shards import shared_out
from ebbtide.optim.adamw import Norms
from ebbtide.policy.together import Alone
from ebbtide.progress import GivenUp

T = TypeVar("T")
R = TypeVar("R")


class World(Alone):
    """One process."""

    rank, size = 0, 1
    here = 1
    """Ranks on this machine."""
    mesh: DeviceMesh | None = None
    link: Link | None = None
    """Where ranks beside these only generate: the way to them."""
    about: Sequence[str] = ()
    """What a person should know of it before the run."""

    def __enter__(self) -> World:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.link is not None and (kind is None or issubclass(kind, Stopped)):
            self.link.end(stopped=kind is not None)

    @property
    def first(self) -> bool:
        """Shows and writes what happens."""
        return self.rank == 0

    @property
    def held(self) -> int:
        """Each rank has about one part in so many of the weights and of what belongs to them."""
        return 1

    def loads_on(self, device: torch.device) -> torch.device:
        """Where the whole model has room before it is shared out."""
        return device

    def any(self, mine: bool) -> bool:
        """Whether it is so on any rank."""
        return mine

    def gathered(self, mine: T) -> list[T]:
        """What each rank has."""
        return [mine]

    def dealt(self, items: Sequence[T], sizes: Sequence[int], work: Callable[[list[T]], Sequence[R]]) -> list[R]:
        """The results of `work` on all items, in order: every rank does its share, which may be nothing, and has all of them.

        What one gives up is given up on all.
        """
        return list(work(list(items)))

    def total(self, norms: Norms, weights: Sequence[nn.Parameter]) -> Norms:
        """Norms of whole gradients from those of what is on this rank."""
        return norms


class Ranks(World):
    """Processes of a torch process group: a mesh of `replicate` x `shard` x `tensor`."""

    def __init__(self, cluster: Cluster, device: torch.device, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=PrefixStore("train", store), rank=rank, world_size=size, timeout=timeout)
        self.rank, self.size = rank, size
        self.here = min(size, int(os.environ.get("LOCAL_WORLD_SIZE", size)))  # which counts those that only generate as well
        self.data = self.size // cluster.tensor
        shape = (cluster.replicate, self.data // cluster.replicate, cluster.tensor)
        self.mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard", "tensor"))
        parts = f"each with one part in {self.held} of the model" if self.held > 1 else "each with the whole model"
        self.about = [f"{self.size} ranks, {parts}: data {self.data}, tensor {cluster.tensor}, replicate {cluster.replicate}"]
        self._place, self._twin = divmod(self.rank, cluster.tensor)
        # On the host and apart from the model's: figures and texts are small, and must not wait for what a GPU has queued.
        self._talk = dist.new_group(backend="gloo", timeout=timeout)
        self._mine: list[bool] = []
        """By trained parameter: whether this rank counts the norm of its part."""

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        super().__exit__(kind)
        if kind is None:
            dist.barrier(self._talk)  # none goes while another still talks to it
            dist.destroy_process_group()

    @property
    def held(self) -> int:
        assert self.mesh is not None
        return self.mesh.size(1) * self.mesh.size(2)

    def loads_on(self, device: torch.device) -> torch.device:
        return torch.device("cpu") if self.held > 1 else device

    # Work

    def share(self, sizes: Sequence[int]) -> list[int]:
        return deal(sizes, self.data)[self._place]

    def dealt(self, items: Sequence[T], sizes: Sequence[int], work: Callable[[list[T]], Sequence[R]]) -> list[R]:
        hands = deal(sizes, self.size)
        try:
            mine: list[R] | None = list(work([items[index] for index in hands[self.rank]]))
        except GivenUp:
            mine = None  # the others wait for what there is of it
        done: dict[int, R] = {}
        for hand, results in zip(hands, self.gathered(mine), strict=True):
            if results is None:
                raise GivenUp
            done |= zip(hand, results, strict=True)
        return [done[index] for index in range(len(items))]

    def spread(self, found: dict[int, Tensor]) -> dict[int, Tensor]:
        known: dict[int, Tensor] = {}
        for some in self.gathered({index: tensor.cpu() for index, tensor in found.items()}):
            known |= some
        return known

    def rounds(self, mine: int) -> int:
        return int(self.largest([float(mine)])[0])

    # Figures

    def summed(self, values: list[float]) -> list[float]:
        table = torch.tensor(values if self._twin == 0 else [0.0] * len(values), dtype=torch.float64)
        dist.all_reduce(table, group=self._talk)
        return table.tolist()

    def largest(self, values: list[float]) -> list[float]:
        table = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(table, dist.ReduceOp.MAX, group=self._talk)
        return table.tolist()

    def any(self, mine: bool) -> bool:
        return self.largest([float(mine)])[0] > 0

    def same(self, value: T) -> T:
        said = [value]
        dist.broadcast_object_list(said, 0, group=self._talk)
        return said[0]

    def total(self, norms: Norms, weights: Sequence[nn.Parameter]) -> Norms:
        if self.size == 1:
            return norms
        self._mine = self._mine or [self._counts(weight) for weight in weights]
        squares, seen = ([0.0] * len(weights) for _ in range(2))
        for number, norm in norms:
            seen[number] = 1.0
            if self._mine[number]:
                squares[number] += norm * norm
        dist.all_reduce(table := torch.tensor([squares, seen], dtype=torch.float64), group=self._talk)
        return [(number, math.sqrt(square)) for number, (square, some) in enumerate(table.T.tolist()) if some]

    def _counts(self, weight: Tensor) -> bool:
        """Of the ranks that have the same part of a weight, one counts it."""
        assert self.mesh is not None
        cut: set[str] = set()
        if shared_out(weight):
            names = weight.device_mesh.mesh_dim_names or ()
            cut = {name for name, way in zip(names, weight.placements, strict=True) if not way.is_replicate()}
        places = zip(self.mesh.mesh_dim_names or (), self.mesh.get_coordinate() or (), strict=True)
        return all(name in cut or place == 0 for name, place in places)

    def gathered(self, mine: T) -> list[T]:
        if self.size == 1:
            return [mine]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, mine, group=self._talk)
        return found


def join(config: Config) -> World:
    """The world that this process was started in: by `torchrun`, by Ebbtide itself, or alone. Ranks that only generate have one each, and the way to those that train."""
    cluster = config.cluster or Cluster()
    count, beside = int(os.environ.get("WORLD_SIZE", "1")), cluster.rollout_gpus
    _check(cluster, count)
    if count == 1:
        return World()
    if config.alone is not None:
        raise UserError(f"{count} ranks were started, and `{config.alone}` goes with one only so far: start one, or remove it")
    from ebbtide.policy.model import pick_device

    if torch.cuda.is_available() and config.device != "cpu":
        mine, there = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if mine >= there:
            raise UserError(
                f"rank {mine} of this machine has no GPU of its own: torch sees {there}. Start no more ranks here (`cluster.gpus`, `cluster.rollout_gpus`), or set `device: cpu`"
            )
        torch.cuda.set_device(mine)
    device, timeout = pick_device(config.device), timedelta(minutes=config.run.distributed_timeout_minutes)
    store, rank, _ = next(rendezvous("env://", timeout=timeout))
    training = count - beside
    world = Ranks(cluster, device, store, rank, training, timeout) if training > 1 and rank < training else World()
    if beside:
        world.link = Link(store, rank, training, beside, device, timeout)
        world.about = [*world.about, f"{beside} {'ranks' if beside > 1 else 'rank'} beside, only to generate, each with the whole model"]
    return world


def _check(cluster: Cluster, count: int) -> None:
    """That so many ranks are what the config is for."""
    training, unit = count - cluster.rollout_gpus, cluster.tensor * cluster.replicate
    if training > 0 and cluster.ranks in (None, training) and training % unit == 0:
        return
    beside = f" that train and {cluster.rollout_gpus} that only generate" if cluster.rollout_gpus else ""
    wanted = f"{cluster.ranks or f'a multiple of {unit}'}{beside}"
    raise UserError(f"{count} ranks were started, and `cluster` is for {wanted}: start as many, or change it")
