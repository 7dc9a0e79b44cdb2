"""What one RL step has to do: how many sequences of how many tokens, and how they are packed."""

from __future__ import annotations

from dataclasses import dataclass

from ebbtide.config.tree import Config


@dataclass(frozen=True)
class Packed:
    """Sequences of one length in micro-batches."""

    count: int
    """Micro-batches."""
    tokens: int
    """Of the fullest one."""
    predicted: int
    """Of those, completion tokens."""


@dataclass(frozen=True)
class Work:
    prompts: int
    samples: int
    prompt: float
    """Tokens of a prompt."""
    new: float
    """Tokens of a completion."""

    @property
    def sequences(self) -> int:
        return self.prompts * self.samples

    @property
    def tokens(self) -> float:
        """That go through the model in training."""
        return self.sequences * (self.prompt + self.new - 1)

    def packed(self, budget: int, minibatches: int = 1) -> Packed:
        """Of the largest minibatch."""
        length = self.prompt + self.new - 1
        sequences = -(-self.sequences // minibatches)
        at_once = max(1, min(sequences, int(budget // max(1.0, length))))
        return Packed(-(-sequences // at_once), round(at_once * length), round(at_once * self.new))


def most_work(config: Config) -> Work:
    """What a step comes to where every prompt and every completion is as long as it may be."""
    rollout = config.rollout
    return Work(rollout.prompts, rollout.samples, rollout.max_prompt_tokens, rollout.max_new_tokens)
