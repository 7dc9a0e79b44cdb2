"""What becomes of a minibatch: the policy is trained on it and stepped, or, in a rehearsal, neither."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ebbtide.memory.plan import Name
from ebbtide.memory.residency import Residency
from ebbtide.optim.adamw import AdamW
from ebbtide.policy.pack import Trajectory
from ebbtide.policy.policy import Policy
from ebbtide.progress import Progress

STATE: tuple[Name, ...] = ("master", "moments")


class Updates(Protocol):
    @property
    def skipped(self) -> str | None:
        """The first parameter whose gradient was not finite, where the last update was skipped for it."""
        ...

    def accumulate(self, minibatch: Sequence[Trajectory], progress: Progress) -> dict[str, float]:
        """In the train phase; what was seen."""
        ...

    def step(self, lr: float) -> dict[str, float]:
        """In the step phase; what was done."""
        ...


class Training:
    """Gradients, and the optimizer's step."""

    def __init__(self, policy: Policy, optimizer: AdamW) -> None:
        self._policy, self._optimizer = policy, optimizer

    def accumulate(self, minibatch: Sequence[Trajectory], progress: Progress) -> dict[str, float]:
        return self._policy.accumulate(minibatch, progress)

    def step(self, lr: float) -> dict[str, float]:
        return self._optimizer.step(lr)

    @property
    def skipped(self) -> str | None:
        return self._optimizer.skipped


class Rehearsing:
    """Log-probs without gradients, and the optimizer's state brought to where a step would use it: nothing changes."""

    skipped = None

    def __init__(self, policy: Policy, residency: Residency) -> None:
        self._policy, self._residency = policy, residency

    def accumulate(self, minibatch: Sequence[Trajectory], progress: Progress) -> dict[str, float]:
        return self._policy.observe(minibatch, progress)

    def step(self, lr: float) -> dict[str, float]:
        for name in STATE:
            if self._residency.holds(name):
                self._residency.need(name)
        return {"lr": lr, "updates_skipped": 0.0}
