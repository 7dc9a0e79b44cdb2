"""What one RL step has to do: how many sequences of how many tokens, and how they are packed."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ebbtide.config.tree import Config


@dataclass(frozen=True)
class Part:
    """A micro-batch."""

    tokens: float
    predicted: float
    """Of those, completion tokens."""


@dataclass(frozen=True)
class Packed:
    """Sequences of one length in micro-batches: full ones, and a last one with what is left."""

    full: Part
    count: int
    """Of full ones."""
    last: Part | None

    @property
    def passes(self) -> int:
        return self.count + (self.last is not None)

    @property
    def parts(self) -> list[tuple[Part, int]]:
        """Each kind, and how many there are of it."""
        return [(self.full, self.count), *([(self.last, 1)] if self.last else [])]


@dataclass(frozen=True)
class Work:
    prompts: int
    samples: int
    prompt: float
    """Tokens of a prompt."""
    new: float
    """Tokens of a completion, on average."""
    longest: float
    """Tokens of the longest completion that is sampled."""
    most_new: int
    """Tokens of a completion that the cache has room for."""
    trained: int | None = None
    """Sequences that are trained on; None is all."""

    @property
    def sequences(self) -> int:
        return self.prompts * self.samples

    def dealt(self, ranks: int) -> Work:
        """What the one of so many ranks has to generate that has most."""
        return self if ranks == 1 else replace(self, prompts=-(-self.prompts // ranks))

    def decode_passes(self, rows: float) -> float:
        """How often a batch of at most `rows` samples decodes: the last ones to begin run in it ever more alone."""
        return self.sequences / rows * self.new + self.longest - self.new

    def packed(self, budget: int, minibatches: int = 1, ranks: int = 1) -> Packed:
        """Of the largest minibatch, what the one of so many ranks has that has most of it."""
        length = max(1.0, self.prompt + self.new - 1)
        sequences = max(1, -(-(self.sequences if self.trained is None else self.trained) // minibatches))
        sequences = -(-sequences // ranks)
        at_once = max(1, min(sequences, int(budget // length)))
        left = sequences % at_once
        last = Part(left * length, left * self.new) if left else None
        return Packed(Part(at_once * length, at_once * self.new), sequences // at_once, last)


def most_work(config: Config) -> Work:
    """What a step comes to where every prompt and every completion is as long as it may be."""
    rollout = config.rollout
    return Work(rollout.prompts, rollout.samples, rollout.max_prompt_tokens, *[rollout.max_new_tokens] * 3)
