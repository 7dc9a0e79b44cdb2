"""Generation and scoring by all ranks: each does its share with the whole model, which is there on every rank meanwhile, and has everyone's results in the end."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ebbtide.cluster.shard import shard
from ebbtide.cluster.world import World
from ebbtide.config.tree import Task as TaskConfig
from ebbtide.memory.shards import everywhere, local
from ebbtide.policy.policy import Policy
from ebbtide.progress import Progress
from ebbtide.rollout.engine import Completion, Engine, Preempting, Request, Sampling
from ebbtide.tasks.scoring import Scored, ScoringPool
from ebbtide.tasks.task import Problem


class Whole:
    """The model with all of its weights. Of one rank's model nothing is anywhere else."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    @contextmanager
    def there(self) -> Iterator[PreTrainedModel]:
        """All ranks come here together."""
        yield self._model

    def engine(self, engine: Engine) -> Engine:
        """One that generates with it."""
        return engine


class Gathered(Whole):
    """A second set of modules, with weights while they are needed: those that train are FSDP's, and gather on all ranks at once or never.

    Of what every rank has whole, its weights are the very tensors that are trained: they take no memory, and their addresses stay.
    """

    def __init__(self, policy: Policy, world: World, mesh: DeviceMesh, device: torch.device) -> None:
        """Shares the policy's model out."""
        self._world = world
        twins: dict[int, nn.Parameter] = {}
        for parameter in policy.model.parameters():
            twin = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            twin.untyped_storage().resize_(0)
            twins[id(parameter)] = nn.Parameter(twin, requires_grad=False)
        super().__init__(copy.deepcopy(policy.model, dict(twins)).to(device))
        shard(policy, mesh, device)
        self._gathered: list[tuple[nn.Parameter, DTensor]] = []
        for twin, parameter in zip(self._model.parameters(), policy.model.parameters(), strict=True):
            if everywhere(parameter):
                twin.data = local(parameter)
            else:
                assert isinstance(parameter, DTensor)
                self._gathered.append((twin, parameter))

    @contextmanager
    @torch.no_grad()
    def there(self) -> Iterator[PreTrainedModel]:
        try:
            for twin, parameter in self._gathered:
                twin.untyped_storage().resize_(twin.numel() * twin.element_size())
                twin.copy_(parameter.full_tensor())
            yield self._model
        finally:
            for twin, _ in self._gathered:
                twin.untyped_storage().resize_(0)

    def engine(self, engine: Engine) -> Engine:
        return SharedEngine(engine, self, self._world)


def share_out(policy: Policy, world: World, device: torch.device) -> Whole:
    """Gives each rank its part of the policy's model."""
    return Whole(policy.model) if world.mesh is None else Gathered(policy, world, world.mesh, device)


class SharedEngine:
    """Every rank generates for its share of the prompts. A sample's randomness is its own, so that it does not matter where it is sampled."""

    def __init__(self, engine: Engine, whole: Whole, world: World) -> None:
        self._engine, self._whole, self._world = engine, whole, world
        self.preempted = 0
        """Samples that gave way in the last call, on all ranks."""

    def generate(self, requests: Sequence[Request], sampling: Sampling, progress: Progress) -> list[list[Completion]]:
        sizes = [len(request.seeds) * (len(request.prompt) + sampling.max_new_tokens) for request in requests]
        with self._whole.there():
            done = self._world.dealt(requests, sizes, lambda mine: self._engine.generate(mine, sampling, progress))
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
