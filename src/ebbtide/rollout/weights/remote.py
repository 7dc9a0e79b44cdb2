"""The engine of training ranks whose completions rollout workers generate (`parallel.rollout_gpus`): it sends them
requests. A worker's side is in launch/generation_worker.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch.distributed.device_mesh import DeviceMesh

from ebbtide.config.model import ModelConfig
from ebbtide.parallel.partition import balance
from ebbtide.policy.policy import Policy
from ebbtide.progress import Progress, WorkAbandoned
from ebbtide.rollout.engine import Completion, Engine, Request, SamplingParams, request_sizes
from ebbtide.rollout.weights.channel import GenerateRequest, RolloutChannel, sent_weights
from ebbtide.rollout.weights.shared import RolloutWeights

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
        self._channel, self._config = channel, policy.config.model
        if mesh is not None:
            policy.shard(mesh, device)

    def engine(self, build: Callable[[PreTrainedModel], Engine], steps: Callable[[], dict[str, int]]) -> Engine:
        return RemoteEngine(self._model, self._config, self._channel, steps)


class RemoteEngine:
    """The engine of a training rank: rollout workers generate, with its weights. A sample's randomness depends on its
    own seed alone, so it does not matter which worker samples it."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: ModelConfig,
        channel: RolloutChannel,
        steps: Callable[[], dict[str, int]],
    ) -> None:
        """`steps` returns the optimizer's step counts: as long as they are the same, so are the weights."""
        self._model, self._config, self._channel, self._steps = model, config, channel, steps
        self._sent: dict[str, int] | None = None
        self.preempted = 0
        """How many times a sample was preempted in the last call, on all ranks."""

    def generate(
        self, requests: Sequence[Request], sampling: SamplingParams, progress: Progress
    ) -> list[list[Completion]]:
        now = self._steps()
        # Workers have loaded the base of adapters, but where it is random they have other numbers.
        base = self._config.lora is None or (self._sent is None and not self._config.has_lasting_base)
        common = self._channel.broadcast_request(
            GenerateRequest(list(requests), sampling, sends_weights=now != self._sent, sends_base=base)
        )
        assert common is not None  # it is the first rank's, which calls this with a request too
        if common.sends_weights:
            self._channel.send(sent_weights(self._model, common))
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
