"""Distillation: bring the policy's distribution of each token to a teacher's, on completions that the policy samples
itself or on those of a file."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

from ebbtide.algorithms.examples import Examples
from ebbtide.algorithms.loop import Algorithm, StepResult
from ebbtide.algorithms.task import HeldOutTask, TaskRollouts, read_problems
from ebbtide.config.algorithms.distill import DistillConfig
from ebbtide.optim.schedule import learning_rate
from ebbtide.policy.datum import Datum, trajectory, weigh_by_token
from ebbtide.policy.losses import Loss
from ebbtide.policy.losses.distillation import VocabularyDivergence, sampled_divergence
from ebbtide.progress import Progress
from ebbtide.rollout.batch import Sample, average_metrics, minibatches, sample_metrics
from ebbtide.rollout.examples import ExampleRows, read_example_rows
from ebbtide.tasks.task import Problems
from ebbtide.worker import Worker

Data = tuple[ExampleRows | None, Problems | None]


def read_data(config: DistillConfig) -> Data:
    """(the examples, if it trains on a file; the problems to sample completions of, or to evaluate on)."""
    rows = read_example_rows(config.data, evaluated=config.evaluate is not None) if config.data is not None else None
    return rows, read_problems(config) if config.generates else None


class Run(Algorithm):
    """One run of distillation on a worker."""

    def __init__(self, worker: Worker, data: Data) -> None:
        assert isinstance(worker.config, DistillConfig)
        self._worker, self._config = worker, worker.config
        rows, problems = data
        self._examples = self._rollouts = None
        if rows is not None and self._config.data is not None:
            self._examples = Examples(worker, rows, self._config.data)
            self.parts = [HeldOutTask(worker, problems.held_out)] if problems is not None else []
        elif problems is not None:
            self._rollouts = TaskRollouts(worker, problems)
            self.parts = [self._rollouts]
        source = self._examples or self._rollouts
        teacher = self._config.teacher.weights or self._config.teacher.path or "a model from scratch"
        self.about = f"{source.about if source is not None else ''}, distillation of {teacher}"
        chunk = self._config.train.head_chunk_tokens
        self._loss: Loss = sampled_divergence
        if self._config.loss.over == "vocabulary":
            self._loss = VocabularyDivergence(partial(worker.frozen_head, "teacher"), self._config.loss.beta, chunk)

    def step(self, step: int) -> StepResult:
        config, worker = self._config, self._worker
        started = time.perf_counter()
        samples: list[Sample] = []
        if self._rollouts is not None:
            samples = self._rollouts.samples(step)
            data = [trajectory(one.prompt.tokens, one.completion.tokens, one.completion.logprobs) for one in samples]
        else:
            assert self._examples is not None
            data = self._examples.next()
        weigh_by_token(data, config.train.minibatches)
        with worker.phase("logprob") as progress:
            self._ask_teacher(data, progress)

        updates: list[dict[str, float]] = []
        updates_per_step = config.train.epochs * config.train.minibatches
        for number, minibatch in enumerate(minibatches(config, data, step)):
            with worker.phase("train") as progress:
                figures = worker.forward_backward(minibatch, self._loss, progress)
            with worker.phase("step"):
                done, total = (step - 1) * updates_per_step + number, config.train.steps * updates_per_step
                figures |= worker.optim_step(learning_rate(config.optimizer, done, total))
            updates.append(figures)

        seconds, tokens = time.perf_counter() - started, sum(datum.length for datum in data)
        found: dict[str, float] = {"tokens": tokens}
        if self._rollouts is not None:
            found = sample_metrics(samples, config.pass_reward) | self._rollouts.metrics()
        metrics = found | average_metrics(updates) | {"seconds": seconds}
        return StepResult(metrics, [datum.sizes for datum in data], samples)

    def _ask_teacher(self, data: Sequence[Datum], progress: Progress) -> None:
        if self._config.loss.over == "vocabulary":
            self._worker.hidden(data, "teacher_hidden", progress, model="teacher")
        else:
            self._worker.logprobs(data, "teacher_logprobs", progress, model="teacher")

    def evaluate(self, step: int, progress: Progress) -> dict[str, float]:
        found = {} if self._examples is None else {"evaluate/kl": self._held_out_divergence(progress)}
        for part in self.parts:
            found |= part.evaluate(step, progress)
        return found

    def _held_out_divergence(self, progress: Progress) -> float:
        """The mean over the targets of all held-out data. Hidden states of no more data than a step has are stored at a
        time: the teacher computes them anew in each evaluation, as those of all would take the memory of a model."""
        assert self._examples is not None
        assert self._config.data is not None
        data, size, total = self._examples.held_out, self._config.data.batch_size, 0.0
        for part in (data[start : start + size] for start in range(0, len(data), size)):
            self._ask_teacher(part, progress)
            total += self._worker.forward(part, self._loss, progress)["kl"] * sum(len(one.targets) for one in part)
            for datum in part:
                del datum.values["teacher_hidden"]
        return total / sum(len(datum.targets) for datum in data)
