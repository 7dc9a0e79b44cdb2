"""DPO: raise the probability of the better completion of each pair against that of the worse, relative to where the
policy began."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from ebbtide.algorithms.loop import Algorithm, StepResult
from ebbtide.algorithms.task import HeldOutTask, read_problems
from ebbtide.config.algorithms.dpo import DpoConfig
from ebbtide.optim.schedule import learning_rate
from ebbtide.policy.datum import Datum
from ebbtide.policy.losses.preference import preference_loss
from ebbtide.progress import Progress
from ebbtide.rollout.examples import ExampleEncoder, ExampleRows, data_digest, encode_pairs, read_example_rows
from ebbtide.system.units import ceil_div
from ebbtide.tasks.sampler import Sampler
from ebbtide.tasks.task import Problem
from ebbtide.worker import Worker

Data = tuple[ExampleRows, Sequence[Problem] | None]


def read_data(config: DpoConfig) -> Data:
    """(the pairs, the problems on which the policy is evaluated if there is a task)."""
    rows = read_example_rows(config.data, evaluated=config.evaluate is not None)
    return rows, read_problems(config).held_out if config.generates else None


class Run(Algorithm):
    """One run of DPO on a worker."""

    def __init__(self, worker: Worker, data: Data) -> None:
        config, (rows, problems) = worker.config, data
        assert isinstance(config, DpoConfig)
        self._config, self._worker = config, worker
        encoder = ExampleEncoder(worker.loaded, config, config.data.max_tokens, config.data.overlong)
        with worker.report.working("encoding pairs") as progress:
            pairs = encode_pairs(rows.train, encoder, config.data, progress)
            held_out = encode_pairs(rows.held_out, encoder, config.data, progress)
        tokens = sum(len(side.tokens) for pair in pairs for side in pair) / len(pairs)
        epoch = ceil_div(len(pairs), config.data.batch_size)
        self.about = (
            f"{len(pairs):,} pairs of {tokens:,.0f} tokens on average, {len(held_out)} held-out ones for evaluation,"
            f" {config.data.batch_size} per step (an epoch is {epoch} steps), dpo ({config.loss.kind})"
        )
        self.parts = [HeldOutTask(worker, problems)] if problems is not None else []
        self._order = Sampler(pairs, config.seed)
        self._loss = partial(
            preference_loss,
            kind=config.loss.kind,
            beta=config.loss.beta,
            label_smoothing=config.loss.label_smoothing,
        )
        worker.track(self._order, data_digest(pairs))
        # These are the initial weights, also in a run that resumes: its checkpoint is loaded later.
        drawn = Sampler(range(len(pairs)), config.seed).draw(config.train.steps * config.data.batch_size)
        sides = [side for number in dict.fromkeys(drawn) for side in pairs[number]]
        if config.loss.reference == "once":
            with worker.report.working("computing the reference's log-probs") as progress:
                worker.logprobs(sides, "reference_logprobs", progress)
        self._held_out = _as_update(held_out)
        worker.logprobs(self._held_out, "reference_logprobs")

    def step(self, step: int) -> StepResult:
        config, worker = self._config, self._worker
        started = time.perf_counter()
        data = _as_update(self._order.draw(config.data.batch_size))
        if config.has_reference:
            with worker.phase("logprob") as progress:
                worker.logprobs(data, "reference_logprobs", progress, model="reference")
        with worker.phase("train") as progress:
            metrics = worker.forward_backward(data, self._loss, progress)
        with worker.phase("step"):
            metrics |= worker.optim_step(learning_rate(config.optimizer, step - 1, config.train.steps))
        metrics |= {"tokens": sum(datum.length for datum in data), "seconds": time.perf_counter() - started}
        return StepResult(metrics, [datum.sizes for datum in data])

    def evaluate(self, step: int, progress: Progress) -> dict[str, float]:
        found = self._worker.forward(self._held_out, self._loss, progress)
        figures = {f"evaluate/{name}": found[name] for name in ("loss", "accuracy", "margin")}
        return figures | {k: v for part in self.parts for k, v in part.evaluate(step, progress).items()}


def _as_update(pairs: Sequence[Sequence[Datum]]) -> list[Datum]:
    """The sides of pairs with their weights, so that the loss is the mean over pairs, and as groups, so that both sides
    of a pair are computed together. They are copies: a batch in which an epoch ends may have a pair twice."""
    return [
        replace(side, values={**side.values, "weights": 1 / len(pairs)}, group=number)
        for number, pair in enumerate(pairs)
        for side in pair
    ]
