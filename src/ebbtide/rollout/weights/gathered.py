"""The weights that rollouts are generated with where the policy is sharded: all ranks all-gather them, and each
generates its share."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ebbtide.memory.gauge import transient
from ebbtide.parallel.comm import Comm
from ebbtide.parallel.costs import GATHERED
from ebbtide.parallel.dtensor import is_replicated, is_sharded, local
from ebbtide.policy.policy import Policy
from ebbtide.progress import Progress, WorkAbandoned
from ebbtide.rollout.engine import Completion, Engine, PreemptingEngine, Request, SamplingParams, request_sizes
from ebbtide.rollout.weights.shared import RolloutWeights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ebbtide.rollout.weights.layerwise import LayerwiseGather, WeightPair

T = TypeVar("T")
R = TypeVar("R")


class GatheredWeights(RolloutWeights):
    """A second set of modules that has weights only while it generates. The modules that train are FSDP's, whose
    forward all-gathers on all ranks at once, and ranks make different numbers of passes.

    Weights that are replicated on every rank are the very tensors that are trained: they need no memory, and their
    addresses stay. The others are gathered for the time of `materialized`, or, with `by_layer`, layer by layer in every
    pass.
    """

    def __init__(self, policy: Policy, comm: Comm, mesh: DeviceMesh, device: torch.device, *, by_layer: bool) -> None:
        """Shards the policy's model too."""
        from ebbtide.rollout.weights.layerwise import LayerwiseGather  # imports torch.distributed's tensors

        self._comm = comm
        empty: dict[int, nn.Parameter] = {}
        for parameter in policy.model.parameters():
            full = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            full.untyped_storage().resize_(0)
            empty[id(parameter)] = nn.Parameter(full, requires_grad=False)
        super().__init__(copy.deepcopy(policy.model, dict(empty)).to(device))
        policy.shard(mesh, device)
        self._gathered: list[WeightPair] = []
        for full, parameter in zip(self._model.parameters(), policy.model.parameters(), strict=True):
            if is_replicated(parameter):
                full.data = local(parameter)
            else:
                assert is_sharded(parameter)
                self._gathered.append((full, parameter))
        self._layers: LayerwiseGather | None = None
        if by_layer:
            timeout = timedelta(minutes=policy.config.run.distributed_timeout_minutes)
            self._layers = LayerwiseGather(self._model, self._gathered, comm, mesh, timeout)
            self._gathered = self._layers.outside_layers

    @contextmanager
    @torch.no_grad()
    def materialized(self) -> Iterator[PreTrainedModel]:
        sizes = [full.numel() * full.element_size() for full, _ in self._gathered]
        with transient(GATHERED.name, sum(sizes)):
            try:
                for (full, parameter), size in zip(self._gathered, sizes, strict=True):
                    full.untyped_storage().resize_(size)
                    full.copy_(parameter.full_tensor())
                with self._layers.materialized() if self._layers is not None else nullcontext():
                    yield self._model
            finally:
                for full, _ in self._gathered:
                    full.untyped_storage().resize_(0)

    def join_remaining_passes(self) -> None:
        """Takes part in the all-gathers of other ranks after this rank's last pass, until no rank has passes left."""
        if self._layers is not None:
            self._layers.join_remaining_passes()

    def engine(self, build: Callable[[PreTrainedModel], Engine], steps: Callable[[], dict[str, int]]) -> Engine:
        return PartitionedEngine(super().engine(build, steps), self, self._comm)


class PartitionedEngine:
    """An engine where every rank generates for its share of the prompts. A sample's randomness depends on its own seed
    alone, so it does not matter which rank samples it."""

    def __init__(self, engine: Engine, weights: GatheredWeights, comm: Comm) -> None:
        self._engine, self._weights, self._comm = engine, weights, comm
        self.preempted = 0
        """How many times a sample was preempted in the last call, on all ranks."""

    def generate(
        self, requests: Sequence[Request], sampling: SamplingParams, progress: Progress
    ) -> list[list[Completion]]:
        def generate_share(engine: Engine, share: Sequence[Request]) -> list[list[Completion]]:
            return engine.generate(share, sampling, progress)

        done = self.map_partitioned(requests, request_sizes(requests, sampling), generate_share)
        preempted = self._engine.preempted if isinstance(self._engine, PreemptingEngine) else 0
        self.preempted = sum(self._comm.all_gather(preempted))
        return done

    def map_partitioned(
        self, items: Sequence[T], sizes: Sequence[int], work: Callable[[Engine, list[T]], Sequence[R]]
    ) -> list[R]:
        """Does work with the engine of each rank on its share of the items, and all-gathers the results."""

        def work_on_share(share: list[T]) -> Sequence[R]:
            try:
                done = work(self._engine, share)
            except WorkAbandoned:
                self._weights.join_remaining_passes()  # other ranks may not have given up yet
                raise
            self._weights.join_remaining_passes()
            return done

        with self._weights.materialized():
            return self._comm.map_partitioned(items, sizes, work_on_share)
