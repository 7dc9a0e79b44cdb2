"""SFT: raise the probability of given text, on assistant turns and completions or on everything."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Self

from ebbtide.algorithms.evaluate import HeldOutTask
from ebbtide.algorithms.loop import Algorithm
from ebbtide.config.algorithms.sft import SftConfig
from ebbtide.optim.schedule import learning_rate
from ebbtide.policy.datum import weigh_by_token
from ebbtide.policy.losses.cross_entropy import cross_entropy
from ebbtide.progress import Progress
from ebbtide.rollout.batch import Sample
from ebbtide.rollout.examples import ExampleEncoder, ExampleRows, data_digest, encode_examples, read_example_rows
from ebbtide.system.units import ceil_div
from ebbtide.tasks.sampler import Sampler
from ebbtide.worker import Worker


def read_data(config: SftConfig) -> ExampleRows:
    return read_example_rows(config.data, evaluated=config.evaluate is not None)


class Run(Algorithm):
    """One run of SFT on a worker."""

    def __init__(self, worker: Worker, rows: ExampleRows) -> None:
        config, data = worker.config, worker.config.data  # type: ignore[attr-defined]
        assert isinstance(config, SftConfig)
        self._config, self._worker = config, worker
        encoder = ExampleEncoder(worker.loaded, config, data.max_tokens, data.overlong)
        with worker.report.working("encoding examples") as progress:
            examples = encode_examples(rows.train, encoder, data, progress)
            held_out = encode_examples(rows.held_out, encoder, data, progress)
        self._held_out = [datum for example in held_out for datum in example]
        weigh_by_token(self._held_out)
        tokens = sum(len(datum.tokens) for example in examples for datum in example) / len(examples)
        self.about = (
            f"{len(examples):,} examples of {tokens:,.0f} tokens on average, {len(held_out)} held-out ones for"
            f" evaluation, {data.batch_size} per step (an epoch is {ceil_div(len(examples), data.batch_size)} steps),"
            " sft"
        )
        self._order = Sampler(examples, config.seed)
        self._task = HeldOutTask(worker) if config.generates else None
        worker.track(self._order, data_digest(examples))

    def __enter__(self) -> Self:
        if self._task is not None:
            self._task.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if self._task is not None:
            self._task.__exit__(*error)

    def step(self, step: int) -> tuple[dict[str, float], Sequence[Sample]]:
        config, worker = self._config, self._worker
        started = time.perf_counter()
        data = [datum for example in self._order.draw(config.data.batch_size) for datum in example]
        weigh_by_token(data)
        with worker.phase("train") as progress:
            metrics = worker.forward_backward(data, cross_entropy, progress)
        with worker.phase("step"):
            metrics |= worker.optim_step(learning_rate(config.optimizer, step - 1, config.train.steps))
        seconds, tokens = time.perf_counter() - started, sum(datum.length for datum in data)
        return metrics | {"seconds": seconds, "tokens": tokens, "tokens_per_second": tokens / seconds}, []

    def evaluate(self, step: int, progress: Progress) -> dict[str, float]:
        loss = self._worker.forward(self._held_out, cross_entropy, progress)["loss"]
        passed = self._task.evaluate(step, progress) if self._task is not None else {}
        return {"evaluate/loss": loss, **passed}
