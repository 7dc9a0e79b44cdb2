"""What the loop does with a minibatch: forward, backward and optimizer step in training, the forward pass alone in a
rehearsal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ebbtide.memory.plan import HoldingName
from ebbtide.memory.residency import Residency
from ebbtide.optim.adamw import AdamW
from ebbtide.policy.packing import Trajectory
from ebbtide.policy.policy import Policy
from ebbtide.progress import Progress

OPTIMIZER_STATE: tuple[HoldingName, ...] = ("master", "moments")


class Updates(Protocol):
    """The updates of a run, one for each minibatch."""

    @property
    def skipped(self) -> str | None:
        """The first parameter whose gradient was not finite, if the last update was skipped because of it."""
        ...

    def accumulate(self, minibatch: Sequence[Trajectory], progress: Progress) -> dict[str, float]:
        """Does the forward and backward pass, in the train phase. Returns metrics."""
        ...

    def step(self, lr: float) -> dict[str, float]:
        """Does the optimizer step, in the step phase. Returns metrics."""
        ...


class TrainUpdates:
    """The updates of training: gradients and optimizer steps."""

    def __init__(self, policy: Policy, optimizer: AdamW) -> None:
        self._policy, self._optimizer = policy, optimizer

    def accumulate(self, minibatch: Sequence[Trajectory], progress: Progress) -> dict[str, float]:
        return self._policy.accumulate(minibatch, progress)

    def step(self, lr: float) -> dict[str, float]:
        return self._optimizer.step(lr)

    @property
    def skipped(self) -> str | None:
        return self._optimizer.skipped_for


class RehearsalUpdates:
    """The updates of a rehearsal: log-probs without gradients, and the optimizer state moved to where a step would use
    it. No weight changes."""

    skipped = None

    def __init__(self, policy: Policy, residency: Residency) -> None:
        self._policy, self._residency = policy, residency

    def accumulate(self, minibatch: Sequence[Trajectory], progress: Progress) -> dict[str, float]:
        return self._policy.forward_only(minibatch, progress)

    def step(self, lr: float) -> dict[str, float]:
        for name in OPTIMIZER_STATE:
            if self._residency.has(name):
                self._residency.need(name)
        return {"lr": lr, "updates_skipped": 0.0}
