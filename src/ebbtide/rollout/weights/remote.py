"""Rollout workers: ranks that only generate (`parallel.rollout_gpus`). This file has the engine of the training ranks,
which sends requests to the workers, and the main function of a worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

import torch
from torch.distributed.device_mesh import DeviceMesh

from ebbtide.config.root import Config
from ebbtide.memory.device_budget import enforce_budget
from ebbtide.memory.host import bind_to_numa_node, frozen_gc, pci_address
from ebbtide.model.load import load_model, pick_device
from ebbtide.parallel.partition import balance
from ebbtide.policy.policy import Policy
from ebbtide.progress import Progress, WorkAbandoned
from ebbtide.rollout.build import build_engine
from ebbtide.rollout.engine import Completion, Engine, PreemptingEngine, Request, SamplingParams, request_sizes
from ebbtide.rollout.weights.channel import GenerateRequest, RolloutChannel
from ebbtide.rollout.weights.shared import RolloutWeights
from ebbtide.system.signals import install_handlers, restore_handlers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Answer = tuple[list[list[Completion]], int] | None
"""The answer of a rollout worker: the completions of its share of the requests, and how many times a sample was
preempted. None: it gave the request up."""


class RemoteWeights(RolloutWeights):
    """The weights where rollout workers generate: training ranks have no second set of modules, and never all weights
    at once."""

    def __init__(self, policy: Policy, channel: RolloutChannel, mesh: DeviceMesh | None, device: torch.device) -> None:
        """Shards the policy's model too, where there are several training ranks."""
        super().__init__(policy.model)
        self._channel = channel
        if mesh is not None:
            policy.shard(mesh, device)

    def engine(self, build: Callable[[PreTrainedModel], Engine], steps: Callable[[], dict[str, int]]) -> Engine:
        return RemoteEngine(self._model, self._channel, steps)


class RemoteEngine:
    """The engine of a training rank: rollout workers generate, with its weights. A sample's randomness depends on its
    own seed alone, so it does not matter which worker samples it."""

    def __init__(self, model: PreTrainedModel, channel: RolloutChannel, steps: Callable[[], dict[str, int]]) -> None:
        """`steps` returns the optimizer's step counts: as long as they are the same, so are the weights."""
        self._model, self._channel, self._steps = model, channel, steps
        self._sent: dict[str, int] | None = None
        self.preempted = 0
        """How many times a sample was preempted in the last call, on all ranks."""

    def generate(
        self, requests: Sequence[Request], sampling: SamplingParams, progress: Progress
    ) -> list[list[Completion]]:
        now = self._steps()
        common = self._channel.broadcast_request(
            GenerateRequest(list(requests), sampling, sends_weights=now != self._sent)
        )
        assert common is not None  # it is the first rank's, which calls this with a request too
        if common.sends_weights:
            self._channel.send(self._model.parameters())
            self._sent = now
        shown = self._channel.progress_monitor(sum(len(request.seeds) for request in requests), progress)
        answers: list[Answer] = self._channel.gather_completions(meanwhile=shown)
        done: dict[int, list[Completion]] = {}
        self.preempted = 0
        shares = balance(request_sizes(requests, sampling), self._channel.generating)
        for share, answer in zip(shares, answers, strict=True):
            if answer is None:
                raise WorkAbandoned
            done |= zip(share, answer[0], strict=True)
            self.preempted += answer[1]
        return [done[index] for index in range(len(requests))]


def generation_worker(config: Config, channel: RolloutChannel) -> None:
    """Runs a rollout worker: it loads the model and serves requests until the training ranks end."""
    device = pick_device(config.device)
    if device.type == "cuda":
        bind_to_numa_node(pci_address(device))
    with _first_signal_ignored(config) as signalled, enforce_budget(device, config.memory.budget_gib):
        loaded = load_model(config, device)
        engine = build_engine(loaded, config, make_room=lambda size: None)
        with frozen_gc():
            while (request := _next_request(channel, signalled)) is not None:
                if request.sends_weights:
                    channel.receive(loaded.model.parameters())
                share = balance(request_sizes(request.requests, request.sampling), channel.generating)[
                    channel.worker_index
                ]
                answer: Answer = [], 0
                if share:
                    try:
                        done = engine.generate(
                            [request.requests[index] for index in share], request.sampling, channel.progress_reporter()
                        )
                        answer = done, engine.preempted if isinstance(engine, PreemptingEngine) else 0
                    except WorkAbandoned:
                        answer = None
                channel.report_progress(1, 1)
                channel.gather_completions(answer)


def _next_request(channel: RolloutChannel, signalled: Callable[[], bool]) -> GenerateRequest | None:
    try:
        return channel.broadcast_request()
    except RuntimeError:  # the training ranks have exited
        if signalled():
            raise KeyboardInterrupt from None
        raise


@contextmanager
def _first_signal_ignored(config: Config) -> Iterator[Callable[[], bool]]:
    """Ignores the first Ctrl-C or SIGTERM: the training ranks get it too, and still finish and save their step. The
    second ends this rank. Yields a function that tells whether there was one."""
    signalled = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal signalled
        if signalled:
            raise KeyboardInterrupt
        signalled = True

    # without checkpoints there is nothing to save
    before = install_handlers(handle) if config.checkpoint is not None else {}
    try:
        yield lambda: signalled
    finally:
        restore_handlers(before)
