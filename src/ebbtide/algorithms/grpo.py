"""GRPO and its kin: sample groups of completions, score them, and raise the probability of those that scored better
than their group."""

from __future__ import annotations

from collections.abc import Sequence

from ebbtide.algorithms.data import RunData
from ebbtide.algorithms.dynamic_sampling import fill_with_signal
from ebbtide.algorithms.loop import Algorithm
from ebbtide.algorithms.task import TaskRollouts
from ebbtide.algorithms.updates import StepResult, train_on
from ebbtide.config.algorithms.grpo import GrpoConfig
from ebbtide.policy.losses import build_loss
from ebbtide.rollout.batch import Sample, assemble, penalise_rewards
from ebbtide.rollout.unmatched import UnmatchedGuard
from ebbtide.worker import Worker


class Run(Algorithm):
    """One run of GRPO on a worker."""

    def __init__(self, worker: Worker, data: RunData) -> None:
        assert isinstance(worker.config, GrpoConfig)
        assert data.problems is not None  # the config has a task
        self._worker, self._config = worker, worker.config
        self.parts = [rollouts := TaskRollouts(worker, data.problems)]
        self._rollouts = rollouts
        self.about = f"{rollouts.about}, {self._config.loss.kind}"
        self._loss, self._unmatched = build_loss(self._config.loss), UnmatchedGuard(self._config)

    def step(self, step: int) -> StepResult:
        config, worker = self._config, self._worker
        rollouts, figures = self._rollouts.next(step), dict[str, float]()
        if (dynamic := config.advantage.dynamic_sampling) is not None:
            rollouts, figures = fill_with_signal(rollouts, self._rollouts.more, step, dynamic.max_num_gen_batches)
        batch = assemble(config, *rollouts)

        with worker.phase("logprob") as progress:
            if config.needs_old_logprobs:
                worker.logprobs(batch.data, "old_logprobs", progress)
            if config.has_reference:
                worker.logprobs(batch.data, "reference_logprobs", progress, model="reference")
        if config.has_kl_in_reward:
            batch = penalise_rewards(config, batch)

        done = train_on(worker, batch.data, self._loss, step, recorded=config.records_old_logprobs)
        metrics = batch.metrics(config.pass_reward) | figures | self._rollouts.metrics() | done.metrics
        return done._replace(metrics=metrics, samples=batch.samples)

    def after_step(self, samples: Sequence[Sample]) -> None:
        if warning := self._unmatched.after_step(samples):
            self._worker.report.warn(f"  {warning}")
