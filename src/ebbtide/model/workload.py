"""The work of one step: how many sequences of how many tokens, and how they are packed into micro-batches."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ebbtide.config.root import Config
from ebbtide.system.units import ceil_div


@dataclass(frozen=True)
class MicroBatchSize:
    """The size of a micro-batch."""

    tokens: float
    completion_tokens: float
    """Completion tokens among them, for which the output head computes logits."""


@dataclass(frozen=True)
class Packing:
    """Sequences of one length packed into micro-batches: full ones, and a last one with the remainder."""

    full: MicroBatchSize
    count: int
    """Number of full micro-batches."""
    last: MicroBatchSize | None

    @property
    def passes(self) -> int:
        """Number of micro-batches."""
        return self.count + (self.last is not None)

    @property
    def parts(self) -> list[tuple[MicroBatchSize, int]]:
        """Each size of micro-batch, and how many there are of it."""
        return [(self.full, self.count), *([(self.last, 1)] if self.last else [])]


@dataclass(frozen=True)
class Workload:
    """The sequences of one step."""

    prompts: int
    samples: int
    """Completions per prompt."""
    prompt_tokens: float
    """Tokens of a prompt."""
    new_tokens: float
    """Tokens of a completion, on average."""
    longest: float
    """Tokens of the longest completion that is sampled."""
    max_new_tokens: int
    """Maximum tokens of a completion, for which the KV cache is sized."""
    trained: int | None = None
    """Sequences that are trained on; None is all."""
    together: int = 1
    """Sequences that are packed into the same micro-batch."""

    @property
    def sequences(self) -> int:
        return self.prompts * self.samples

    def largest_share(self, ranks: int) -> Workload:
        """The share of the rank that generates the most, among so many ranks."""
        return self if ranks == 1 else replace(self, prompts=ceil_div(self.prompts, ranks))

    def decode_passes(self, rows: float) -> float:
        """Number of decode steps with at most `rows` sequences in the batch, which empties while the last ones
        finish."""
        return self.sequences / rows * self.new_tokens + self.longest - self.new_tokens

    def pack(self, budget: int, minibatches: int = 1, ranks: int = 1) -> Packing:
        """The micro-batches of the largest minibatch, on the rank with the most of it among so many ranks. `budget`:
        tokens per micro-batch."""
        length = self.together * max(1.0, self.prompt_tokens + self.new_tokens - 1)
        new_tokens = self.together * self.new_tokens
        sequences = self.sequences if self.trained is None else self.trained
        units = max(1, ceil_div(ceil_div(sequences, self.together), minibatches))
        units = ceil_div(units, ranks)
        at_once = max(1, min(units, int(budget // length)))
        left = units % at_once
        last = MicroBatchSize(left * length, left * new_tokens) if left else None
        return Packing(MicroBatchSize(at_once * length, at_once * new_tokens), units // at_once, last)


def max_workload(config: Config) -> Workload:
    """The work of a step in which every prompt and every completion has the maximum length."""
    size = config.step_size
    work = Workload(size.groups, size.samples, size.prompt_tokens, *[size.new_tokens] * 3)
    return replace(work, together=config.packed_together)
