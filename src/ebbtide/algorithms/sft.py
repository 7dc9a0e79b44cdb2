"""SFT: raise the probability of given text, on assistant turns and completions or on everything."""

from __future__ import annotations

from ebbtide.algorithms.data import RunData
from ebbtide.algorithms.examples import Examples
from ebbtide.algorithms.loop import Algorithm
from ebbtide.algorithms.updates import StepResult, train_on
from ebbtide.policy.losses.cross_entropy import cross_entropy
from ebbtide.progress import Progress
from ebbtide.worker import Worker


class Run(Algorithm):
    """One run of SFT on a worker."""

    def __init__(self, worker: Worker, data: RunData) -> None:
        self._worker, self._examples = worker, Examples(worker, data)
        self.about = f"{self._examples.about}, sft"
        self.parts = self._examples.evaluated_task

    def step(self, step: int) -> StepResult:
        return train_on(self._worker, self._examples.next(), cross_entropy, step)

    def evaluate(self, progress: Progress) -> dict[str, float]:
        return {"evaluate/loss": self._worker.forward(self._examples.held_out, cross_entropy, progress)["loss"]}
