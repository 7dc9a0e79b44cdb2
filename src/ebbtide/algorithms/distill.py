"""Distillation: bring the policy's distribution of each token to a teacher's, on completions that the policy samples
itself or on those of a file."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ebbtide.algorithms.data import RunData
from ebbtide.algorithms.examples import Examples, in_slices
from ebbtide.algorithms.loop import Algorithm
from ebbtide.algorithms.task import TaskRollouts
from ebbtide.algorithms.updates import StepResult, train_on
from ebbtide.config.algorithms.distill import DistillConfig
from ebbtide.policy.datum import Datum, trajectory, weigh_by_token
from ebbtide.policy.losses import Loss
from ebbtide.policy.losses.distillation import VocabularyDivergence, sampled_divergence
from ebbtide.progress import Progress
from ebbtide.rollout.batch import Sample, sample_metrics
from ebbtide.worker import Worker


class Run(Algorithm):
    """One run of distillation on a worker."""

    def __init__(self, worker: Worker, data: RunData) -> None:
        assert isinstance(worker.config, DistillConfig)
        self._worker, self._config = worker, worker.config
        self._examples = self._rollouts = None
        if data.rows is not None:
            self._examples = Examples(worker, data)
            self.about, self.parts = self._examples.about, self._examples.evaluated_task
        elif data.problems is not None:
            self._rollouts = TaskRollouts(worker, data.problems)
            self.about, self.parts = self._rollouts.about, [self._rollouts]
        self.about += f", distillation of {self._config.teacher.weights or self._config.teacher.path or 'a new model'}"
        chunk = self._config.train.head_chunk_tokens
        self._loss: Loss = sampled_divergence
        if self._config.loss.over == "vocabulary":
            self._loss = VocabularyDivergence(partial(worker.frozen_head, "teacher"), self._config.loss.beta, chunk)

    def step(self, step: int) -> StepResult:
        samples: list[Sample] = []
        metrics: dict[str, float] = {}
        if self._rollouts is not None:
            samples = self._rollouts.samples(step)
            metrics = sample_metrics(samples, self._config.pass_reward) | self._rollouts.metrics()
            data = [trajectory(one.prompt.tokens, one.completion.tokens, one.completion.logprobs) for one in samples]
        else:
            assert self._examples is not None
            data = self._examples.next()
        weigh_by_token(data, self._config.train.minibatches)
        with self._worker.phase("logprob") as progress:
            self._ask_teacher(data, progress)
        done = train_on(self._worker, data, self._loss, step)
        return done._replace(metrics=metrics | done.metrics, samples=samples)

    def _ask_teacher(self, data: Sequence[Datum], progress: Progress) -> None:
        if self._config.loss.over == "vocabulary":
            self._worker.hidden(data, "teacher_hidden", progress, model="teacher")
        else:
            self._worker.logprobs(data, "teacher_logprobs", progress, model="teacher")

    def evaluate(self, progress: Progress) -> dict[str, float]:
        """The mean over the targets of all held-out data. Hidden states of no more data than a step has are stored at a
        time: the teacher computes them anew in each evaluation, as those of all would take the memory of a model."""
        if self._examples is None or self._config.data is None:
            return {}
        total, targets = 0.0, 0
        for data in in_slices(self._examples.held_out, self._config.data.batch_size):
            self._ask_teacher(data, progress)
            count = sum(len(datum.targets) for datum in data)
            total += self._worker.forward(data, self._loss, progress)["kl"] * count
            targets += count
            for datum in data:
                del datum.values["teacher_hidden"]
        return {"evaluate/kl": total / targets}
