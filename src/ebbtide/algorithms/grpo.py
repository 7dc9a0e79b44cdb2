"""GRPO and its kin: sample groups of completions, score them, and raise the probability of those that scored better
than their group."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Self

from ebbtide.algorithms.evaluate import evaluate
from ebbtide.algorithms.loop import Algorithm
from ebbtide.config.algorithms.grpo import GrpoConfig
from ebbtide.errors import UserError
from ebbtide.optim.schedule import learning_rate
from ebbtide.policy.losses import build_loss
from ebbtide.progress import Progress
from ebbtide.rollout.batch import Sample, assemble, average_metrics, minibatches
from ebbtide.rollout.partitioned_scoring import PartitionedScoring
from ebbtide.rollout.prompts import control_text_notes, encode_prompts, prompts_digest
from ebbtide.rollout.serve.train_server import serve_during_training
from ebbtide.rollout.sources import build_source
from ebbtide.rollout.unmatched import UnmatchedGuard
from ebbtide.tasks.build import build_task
from ebbtide.tasks.sampler import Sampler
from ebbtide.tasks.scoring import ScoringPool
from ebbtide.tasks.task import Problems
from ebbtide.worker import Worker


def read_data(config: GrpoConfig) -> Problems:
    return build_task(config.task, config.seed, evaluated=config.evaluate is not None).problems()


class Run(Algorithm):
    """One run of GRPO on a worker."""

    def __init__(self, worker: Worker, problems: Problems) -> None:
        config, policy, report = worker.config, worker.policy, worker.report
        assert isinstance(config, GrpoConfig)
        self._config, self._worker = config, worker
        with report.working("encoding prompts") as progress:
            prompts = encode_prompts(problems.train, policy.tokenizer, policy.vocabulary_rows, config, progress)
            held_out = problems.held_out[: config.evaluate.max_problems] if config.evaluate else []
            self._eval_prompts = encode_prompts(held_out, policy.tokenizer, policy.vocabulary_rows, config, progress)
            if config.evaluate and not self._eval_prompts:
                raise UserError(
                    "`evaluate` needs held-out problems and the task has none: add some, or set `evaluate: null`"
                )
        for text in control_text_notes([*prompts, *self._eval_prompts]):
            report.note(text)
        self.about = (
            f"{len(prompts):,} problems, {len(self._eval_prompts)} held-out ones for evaluation,"
            f" {config.rollout.prompts_per_step} x {config.rollout.group_size} samples per step, {config.loss.kind}"
        )
        self._loss = build_loss(config.loss)
        self._unmatched = UnmatchedGuard(config)
        order = Sampler(prompts, config.seed)
        self._rollouts = build_source(
            config,
            worker.engine,
            order,
            prompts,
            worker.residency,
            rows=policy.vocabulary_rows,
            writes=worker.comm.is_main,
        )
        worker.track(order, prompts_digest(prompts), self._rollouts)
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        """Starts the processes that score, and the server of `rollout.serve_port`."""
        worker, config = self._worker, self._config
        pool = self._stack.enter_context(ScoringPool(config.task, config.seed))
        self._scoring = PartitionedScoring(pool, worker.comm)
        self._stack.enter_context(serve_during_training(worker.engine, worker.loaded, config, worker.report.note))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.__exit__(*error)  # type: ignore[arg-type]

    def step(self, step: int) -> tuple[dict[str, float], Sequence[Sample]]:
        config, worker = self._config, self._worker
        started = time.perf_counter()

        with worker.phase("generate") as progress:
            prompts, groups = self._rollouts.next(step, progress)

        with worker.phase("score") as progress:
            completions = [
                (prompt.problem, completion.text)
                for prompt, group in zip(prompts, groups, strict=True)
                for completion in group
            ]
            scored = self._scoring.score(completions, progress)
        batch = assemble(config, prompts, groups, scored)

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
        return metrics | {"seconds": seconds}, batch.samples

    def after_step(self, samples: Sequence[Sample]) -> None:
        if warning := self._unmatched.after_step(samples):
            self._worker.report.warn(f"  {warning}")

    def evaluate(self, step: int, progress: Progress) -> dict[str, float]:
        last = step == self._config.train.steps
        return evaluate(self._config, self._worker.engine, self._scoring, self._eval_prompts, progress, last=last)
