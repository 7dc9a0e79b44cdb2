"""The examples of `data` on a worker: those of each step, and those that are held out."""

from __future__ import annotations

from dataclasses import replace

from ebbtide.config.data import ExamplesConfig
from ebbtide.policy.datum import Datum, weigh_by_token
from ebbtide.rollout.examples import ExampleEncoder, ExampleRows, data_digest, encode_examples
from ebbtide.system.units import ceil_div
from ebbtide.tasks.sampler import Sampler
from ebbtide.worker import Worker


class Examples:
    """Encoded examples, in an order that depends on the seed and is part of checkpoints."""

    def __init__(self, worker: Worker, rows: ExampleRows, data: ExamplesConfig) -> None:
        encoder = ExampleEncoder(worker.loaded, worker.config, data.max_tokens, data.overlong)
        with worker.report.working("encoding examples") as progress:
            examples = encode_examples(rows.train, encoder, data, progress)
            held_out = encode_examples(rows.held_out, encoder, data, progress)
        self.held_out = _as_update(held_out)
        """The data of the held-out examples."""
        self._batch_size, self._order = data.batch_size, Sampler(examples, worker.config.seed)
        tokens = sum(len(datum.tokens) for example in examples for datum in example) / len(examples)
        self.about = (
            f"{len(examples):,} examples of {tokens:,.0f} tokens on average, {len(held_out)} held-out ones for"
            f" evaluation, {data.batch_size} per step (an epoch is {ceil_div(len(examples), data.batch_size)} steps)"
        )
        worker.track(self._order, data_digest(examples))

    def next(self) -> list[Datum]:
        """The data of the next step."""
        return _as_update(self._order.draw(self._batch_size))


def _as_update(examples: list[list[Datum]]) -> list[Datum]:
    """The data of examples, weighted so that the loss is the mean over their targets. They are copies, as a step adds
    values to them."""
    data = [replace(datum, values=dict(datum.values)) for example in examples for datum in example]
    weigh_by_token(data)
    return data
