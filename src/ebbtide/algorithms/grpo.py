"""GRPO and its kin: sample groups of completions, score them, and raise the probability of those that scored better
than their group."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ebbtide.algorithms.loop import Algorithm, StepResult
from ebbtide.algorithms.task import TaskRollouts, read_problems
from ebbtide.config.algorithms.grpo import GrpoConfig
from ebbtide.optim.schedule import learning_rate
from ebbtide.policy.losses import build_loss
from ebbtide.progress import Progress
from ebbtide.rollout.batch import Sample, assemble, average_metrics, minibatches
from ebbtide.rollout.unmatched import UnmatchedGuard
from ebbtide.tasks.task import Problems
from ebbtide.worker import Worker

read_data = read_problems


class Run(Algorithm):
    """One run of GRPO on a worker."""

    def __init__(self, worker: Worker, problems: Problems) -> None:
        assert isinstance(worker.config, GrpoConfig)
        self._worker, self._config = worker, worker.config
        self.parts = [rollouts := TaskRollouts(worker, problems)]
        self._rollouts = rollouts
        self.about = f"{rollouts.about}, {self._config.loss.kind}"
        self._loss, self._unmatched = build_loss(self._config.loss), UnmatchedGuard(self._config)

    def step(self, step: int) -> StepResult:
        config, worker = self._config, self._worker
        started = time.perf_counter()
        batch = assemble(config, *self._rollouts.next(step))

        with worker.phase("logprob") as progress:
            if config.needs_old_logprobs:
                worker.logprobs(batch.data, "old_logprobs", progress)
            if config.has_reference:
                worker.logprobs(batch.data, "reference_logprobs", progress, model="reference")

        updates: list[dict[str, float]] = []
        updates_per_step = config.train.epochs * config.train.minibatches
        for number, minibatch in enumerate(minibatches(config, batch.data, step)):
            with worker.phase("train") as progress:
                figures = worker.forward_backward(minibatch, self._loss, progress)
            with worker.phase("step"):
                done, total = (step - 1) * updates_per_step + number, config.train.steps * updates_per_step
                figures |= worker.optim_step(learning_rate(config.optimizer, done, total))
            updates.append(figures)

        seconds = time.perf_counter() - started
        metrics = batch.metrics(config.pass_reward) | self._rollouts.metrics() | average_metrics(updates)
        return StepResult(metrics | {"seconds": seconds}, [datum.sizes for datum in batch.data], batch.samples)

    def after_step(self, samples: Sequence[Sample]) -> None:
        if warning := self._unmatched.after_step(samples):
            self._worker.report.warn(f"  {warning}")

    def evaluate(self, step: int, progress: Progress) -> dict[str, float]:
        return self._rollouts.evaluate(step, progress)
