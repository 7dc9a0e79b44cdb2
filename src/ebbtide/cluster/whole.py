"""Generation and scoring by all ranks: each does its share with the whole model, which is there on every rank meanwhile, and has everyone's results in the end."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ebbtide.cluster.apart import ApartEngine
from ebbtide.cluster.deal import sizes
from ebbtide.cluster.link import Link
from ebbtide.cluster.world import World
from ebbtide.config.tree import Task as TaskConfig
from ebbtide.memory.plan import Place
from ebbtide.memory.shards import everywhere, local, shared_out
from ebbtide.policy.policy import Policy
from ebbtide.progress import GivenUp, Progress
from ebbtide.rollout.engine import Completion, Engine, Preempting, Request, Sampling
from ebbtide.tasks.answer import Scored
from ebbtide.tasks.scoring import ScoringPool
from ebbtide.tasks.task import Problem

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ebbtide.cluster.by_layer import Layers, Pair


class Whole:
    """The model with all of its weights. Of one rank's model nothing is anywhere else."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    @contextmanager
    def there(self) -> Iterator[PreTrainedModel]:
        """All ranks come here together."""
        yield self._model

    def engine(self, build: Callable[[PreTrainedModel], Engine], steps: Callable[[], dict[str, int]]) -> Engine:
        """One that generates with it. `steps` of the optimizer: where they are as they were, so are the weights."""
        with self.there() as model:
            return build(model)


class Gathered(Whole):
    """A second set of modules, with weights while they are needed: those that train are FSDP's, and gather on all ranks at once or never.

    Of what every rank has whole, its weights are the very tensors that are trained: they take no memory, and their addresses stay.
    The others are gathered for as long as they are there; or, those of layers, in every pass.
    """

    def __init__(self, policy: Policy, world: World, mesh: DeviceMesh, device: torch.device, *, by_layer: bool) -> None:
        """Shares the policy's model out."""
        from ebbtide.cluster.by_layer import Layers  # with torch's parts for several ranks
        from ebbtide.cluster.shard import shard

        self._world = world
        twins: dict[int, nn.Parameter] = {}
        for parameter in policy.model.parameters():
            twin = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            twin.untyped_storage().resize_(0)
            twins[id(parameter)] = nn.Parameter(twin, requires_grad=False)
        super().__init__(copy.deepcopy(policy.model, dict(twins)).to(device))
        shard(policy, mesh, device)
        self._gathered: list[Pair] = []
        for twin, parameter in zip(self._model.parameters(), policy.model.parameters(), strict=True):
            if everywhere(parameter):
                twin.data = local(parameter)
            else:
                assert shared_out(parameter)
                self._gathered.append((twin, parameter))
        self._layers: Layers | None = None
        if by_layer:
            timeout = timedelta(minutes=policy.config.run.distributed_timeout_minutes)
            self._layers = Layers(self._model, self._gathered, world, mesh, timeout)
            self._gathered = self._layers.rest

    @contextmanager
    @torch.no_grad()
    def there(self) -> Iterator[PreTrainedModel]:
        try:
            for twin, parameter in self._gathered:
                twin.untyped_storage().resize_(twin.numel() * twin.element_size())
                twin.copy_(parameter.full_tensor())
            with self._layers.there() if self._layers is not None else nullcontext():
                yield self._model
        finally:
            for twin, _ in self._gathered:
                twin.untyped_storage().resize_(0)

    def until_all_are_done(self) -> None:
        """When this rank has no pass to make any more: others may need it for theirs."""
        if self._layers is not None:
            self._layers.until_all_are_done()

    def engine(self, build: Callable[[PreTrainedModel], Engine], steps: Callable[[], dict[str, int]]) -> Engine:
        return SharedEngine(super().engine(build, steps), self, self._world)


class Apart(Whole):
    """The model that trains, where others generate: no second set of modules, and never all weights at once."""

    def __init__(self, policy: Policy, link: Link, mesh: DeviceMesh | None, device: torch.device) -> None:
        """Shares the policy's model out, where there are several to share it."""
        super().__init__(policy.model)
        self._link = link
        if mesh is not None:
            from ebbtide.cluster.shard import shard

            shard(policy, mesh, device)

    def engine(self, build: Callable[[PreTrainedModel], Engine], steps: Callable[[], dict[str, int]]) -> Engine:
        return ApartEngine(self._model, self._link, steps)


def share_out(policy: Policy, world: World, device: torch.device, weights: Place) -> Whole:
    """Gives each rank its part of the policy's model; `weights`: what the plan says of them in generation."""
    if world.link is not None:
        return Apart(policy, world.link, world.mesh, device)
    if world.mesh is None:
        return Whole(policy.model)
    return Gathered(policy, world, world.mesh, device, by_layer=weights == "by layer")


class SharedEngine:
    """Every rank generates for its share of the prompts. A sample's randomness is its own, so that it does not matter where it is sampled."""

    def __init__(self, engine: Engine, whole: Gathered, world: World) -> None:
        self._engine, self._whole, self._world = engine, whole, world
        self.preempted = 0
        """Samples that gave way in the last call, on all ranks."""

    def generate(self, requests: Sequence[Request], sampling: Sampling, progress: Progress) -> list[list[Completion]]:
        def share(mine: Sequence[Request]) -> list[list[Completion]]:
            try:
                found = self._engine.generate(mine, sampling, progress)
            except GivenUp:
                self._whole.until_all_are_done()  # others may not have heard of it yet
                raise
            self._whole.until_all_are_done()
            return found

        with self._whole.there():
            done = self._world.dealt(requests, sizes(requests, sampling), share)
        mine = self._engine.preempted if isinstance(self._engine, Preempting) else 0
        self.preempted = sum(self._world.gathered(mine))
        return done


class SharedScoring(ScoringPool):
    """Every rank scores its share, in processes of its own."""

    def __init__(self, config: TaskConfig, seed: int, world: World) -> None:
        super().__init__(config, seed)
        self._world = world

    def score(self, work: Sequence[tuple[Problem, str]], progress: Progress = lambda done, of: None) -> list[Scored]:
        score = super().score
        return self._world.dealt(work, [1] * len(work), lambda mine: score(mine, progress))
