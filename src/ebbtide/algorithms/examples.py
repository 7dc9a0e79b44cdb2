"""The examples or pairs of `data` on a worker: those of each step, and those that are held out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from ebbtide.algorithms.data import RunData
from ebbtide.algorithms.task import HeldOutTask
from ebbtide.checkpoint.contents import read_run
from ebbtide.checkpoint.manifest import CheckpointFiles
from ebbtide.config.data import ExamplesConfig, PairsConfig
from ebbtide.policy.datum import Datum, weigh_by_token
from ebbtide.rollout.examples import ExampleEncoder, data_digest, encode_examples, encode_pairs
from ebbtide.system.units import ceil_div
from ebbtide.tasks.sampler import Sampler
from ebbtide.worker import Worker

T = TypeVar("T")


class Examples:
    """Encoded examples, in an order that depends on the seed and is part of checkpoints."""

    def __init__(self, worker: Worker, data: RunData) -> None:
        self._worker, config, rows = worker, worker.config.trained_file, data.rows
        assert isinstance(config, ExamplesConfig | PairsConfig)
        assert rows is not None  # they are read where there is a file
        kind = "pairs" if isinstance(config, PairsConfig) else "examples"
        encoder = ExampleEncoder(worker.loaded, worker.config, config.max_tokens, config.overlong)
        with worker.report.working(f"encoding {kind}") as progress:
            self.train, held_out = (
                encode_pairs(some, encoder, config, progress)
                if isinstance(config, PairsConfig)
                else encode_examples(some, encoder, config, progress)
                for some in (rows.train, rows.held_out)
            )
        self._as_update = pairs_as_update if isinstance(config, PairsConfig) else examples_as_update
        self.held_out = self._as_update(held_out)
        """The data of the held-out examples."""
        self._batch_size, self._order = config.batch_size, Sampler(self.train, worker.config.seed)
        tokens = sum(len(datum.tokens) for example in self.train for datum in example) / len(self.train)
        self.about = (
            f"{len(self.train):,} {kind} of {tokens:,.0f} tokens on average, {len(held_out)} held-out ones for"
            f" evaluation, {config.batch_size} per step (an epoch is {ceil_div(len(self.train), config.batch_size)}"
            " steps)"
        )
        self.evaluated_task = [HeldOutTask(worker, data.problems.held_out)] if data.problems is not None else []
        """The task whose held-out problems are evaluated on, if there is one."""
        worker.track(self._order, data_digest(self.train))

    def next(self) -> list[Datum]:
        """The data of the next step."""
        return self._as_update(self._order.draw(self._batch_size))

    def slices_still_drawn(self) -> Iterator[list[Datum]]:
        """The data that the rest of the run draws, in slices as large as a step. They are parts of the first epoch, and
        whole, so that a run that resumes computes each with the same others as before: that gives the same bits."""
        config, numbers = self._worker.config, range(len(self.train))
        order = Sampler(numbers, config.seed)
        first_epoch, left = order.draw(len(numbers)), config.train.steps
        order.seek(0, 0)
        if (resumed := self._worker.resumed) is not None:
            run = read_run(CheckpointFiles(resumed.path))
            order.seek(run.sampler.epoch, run.sampler.position)
            left -= run.step
        needed = set(order.draw(left * self._batch_size))
        for part in in_slices(first_epoch, self._batch_size):
            if needed.intersection(part):
                yield [datum for number in part for datum in self.train[number]]


def in_slices(items: Sequence[T], size: int) -> list[Sequence[T]]:
    return [items[start : start + size] for start in range(0, len(items), size)]


def examples_as_update(examples: Sequence[Sequence[Datum]]) -> list[Datum]:
    """The data of examples, weighted so that the loss is the mean over their targets."""
    data = [datum for example in copies(examples) for datum in example]
    weigh_by_token(data)
    return data


def pairs_as_update(pairs: Sequence[Sequence[Datum]]) -> list[Datum]:
    """The sides of pairs, weighted so that the loss is the mean over pairs, and as groups, so that both sides of a pair
    are computed together."""
    data = []
    for number, pair in enumerate(copies(pairs)):
        for side in pair:
            side.group, side.values["weights"] = number, 1 / len(pairs)
            data.append(side)
    return data


def copies(examples: Sequence[Sequence[Datum]]) -> list[list[Datum]]:
    """Copies of data, as a step adds values to them, and a batch in which an epoch ends may have an example twice."""
    return [[replace(datum, values=dict(datum.values)) for datum in example] for example in examples]
