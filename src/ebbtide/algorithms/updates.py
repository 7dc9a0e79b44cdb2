"""The updates of a step, whatever its algorithm: the optimizer steps on minibatches of its data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ebbtide.optim.schedule import learning_rate
from ebbtide.policy.datum import Datum
from ebbtide.policy.exact import check_exact
from ebbtide.policy.losses import Loss
from ebbtide.rollout.batch import Sample, average_metrics, minibatches
from ebbtide.worker import Worker


class StepResult(NamedTuple):
    """What a step of an algorithm has done."""

    metrics: dict[str, float]
    lengths: Sequence[tuple[int, int]]
    """(tokens without loss, tokens with loss) of each sequence that was trained on."""
    samples: Sequence[Sample] = ()
    """The completions that were sampled in it."""


def train_on(worker: Worker, data: Sequence[Datum], loss: Loss, step: int, *, recorded: bool = False) -> StepResult:
    """Trains on the data of a step in the phases train and step. `recorded`: the log-probs that the sampler recorded
    are the trainer's before the first update, which is checked in that update."""
    config, found = worker.config, list[dict[str, float]]()
    per_step = config.train.epochs * config.train.minibatches
    for number, minibatch in enumerate(minibatches(config, data, step), start=(step - 1) * per_step):
        with worker.phase("train") as progress:
            figures = worker.forward_backward(minibatch, loss, progress)
        if recorded and not found:
            check_exact(figures)
            for datum in data:
                datum.values["old_logprobs"] = datum.values["rollout_logprobs"]
        with worker.phase("step"):
            figures |= worker.optim_step(learning_rate(config.optimizer, number, config.train.steps * per_step))
        found.append(figures)
    metrics = average_metrics(found) | {"tokens": sum(datum.length for datum in data)}
    return StepResult(metrics, [datum.sizes for datum in data])
