"""SFT: raise the probability of given text, on assistant turns and completions or on everything."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ebbtide.algorithms.examples import Examples
from ebbtide.algorithms.loop import Algorithm, StepResult
from ebbtide.algorithms.task import HeldOutTask, read_problems
from ebbtide.config.algorithms.sft import SftConfig
from ebbtide.optim.schedule import learning_rate
from ebbtide.policy.losses.cross_entropy import cross_entropy
from ebbtide.progress import Progress
from ebbtide.rollout.examples import ExampleRows, read_example_rows
from ebbtide.tasks.task import Problem
from ebbtide.worker import Worker

Data = tuple[ExampleRows, Sequence[Problem] | None]


def read_data(config: SftConfig) -> Data:
    """(the examples, the problems on which the policy is evaluated if there is a task)."""
    rows = read_example_rows(config.data, evaluated=config.evaluate is not None)
    return rows, read_problems(config).held_out if config.generates else None


class Run(Algorithm):
    """One run of SFT on a worker."""

    def __init__(self, worker: Worker, data: Data) -> None:
        assert isinstance(worker.config, SftConfig)
        self._worker, self._config = worker, worker.config
        rows, problems = data
        self._examples = Examples(worker, rows, self._config.data)
        self.about = f"{self._examples.about}, sft"
        self.parts = [HeldOutTask(worker, problems)] if problems is not None else []

    def step(self, step: int) -> StepResult:
        config, worker = self._config, self._worker
        started = time.perf_counter()
        data = self._examples.next()
        with worker.phase("train") as progress:
            metrics = worker.forward_backward(data, cross_entropy, progress)
        with worker.phase("step"):
            metrics |= worker.optim_step(learning_rate(config.optimizer, step - 1, config.train.steps))
        metrics |= {"tokens": sum(datum.length for datum in data), "seconds": time.perf_counter() - started}
        return StepResult(metrics, [datum.sizes for datum in data])

    def evaluate(self, step: int, progress: Progress) -> dict[str, float]:
        loss = self._worker.forward(self._examples.held_out, cross_entropy, progress)["loss"]
        return {"evaluate/loss": loss} | {k: v for part in self.parts for k, v in part.evaluate(step, progress).items()}
