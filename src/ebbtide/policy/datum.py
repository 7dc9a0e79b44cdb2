"""The datum: a sequence of tokens, which of them carry loss, and what the loss needs to know about each of those."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeAlias

import torch
from torch import Tensor

Value: TypeAlias = float | Sequence[float] | Tensor
"""A value of a datum: one number for all of its targets, or one entry for each (a tensor may have rows of any
shape)."""


@dataclass
class Datum:
    """One sequence on its way to the trainer: a sampled completion, an example with answers in several turns, or one
    side of a pair."""

    tokens: list[int]
    targets: Sequence[int]
    """Positions of the tokens that carry loss, in ascending order: of any number of turns, but never the first
    token, which nothing predicts."""
    values: dict[str, Value] = field(default_factory=dict)
    """What the loss reads, by name: `advantages`, `weights`, `rollout_logprobs` and so on. `weights` are the weights
    of targets in the loss; they are set for a whole update at once, so that losses of micro-batches are summed."""
    group: int | None = None
    """Data of the same group are packed into the same micro-batch."""

    def __post_init__(self) -> None:
        if isinstance(self.targets, range) and self.targets.step != 1:
            self.targets = list(self.targets)
        ascending = isinstance(self.targets, range) or all(before < after for before, after in pairwise(self.targets))
        if not self.targets or self.targets[0] < 1 or self.targets[-1] >= len(self.tokens) or not ascending:
            raise ValueError(
                f"the targets of a datum are positions from 1 to {len(self.tokens) - 1} of its {len(self.tokens)}"
                f" tokens, at least one of them and in ascending order, but are {list(self.targets[:8])}"
            )
        first, last = self.targets[0], self.targets[-1]
        if last - first + 1 == len(self.targets):  # one turn: a range takes less memory, and is packed faster
            self.targets = range(first, last + 1)

    @classmethod
    def completion(cls, prompt: Sequence[int], completion: Sequence[int], **values: Value) -> Datum:
        """A prompt and a completion, which carries the loss."""
        tokens = [*prompt, *completion]
        return cls(tokens, range(len(prompt), len(tokens)), values)

    @classmethod
    def masked(cls, tokens: Sequence[int], mask: Sequence[bool], **values: Value) -> Datum:
        """Tokens, of which those carry loss for which `mask` is true."""
        if len(mask) != len(tokens):
            raise ValueError(f"the mask has {len(mask)} entries for {len(tokens)} tokens")
        return cls(list(tokens), [place for place, carries in enumerate(mask) if carries], values)

    @property
    def length(self) -> int:
        """Tokens that go through the model: those before the last target."""
        return self.targets[-1]

    @property
    def sizes(self) -> tuple[int, int]:
        """(tokens without loss, tokens with loss), up to the last target."""
        return self.length + 1 - len(self.targets), len(self.targets)


def trajectory(
    prompt: Sequence[int],
    completion: Sequence[int],
    rollout_logprobs: Sequence[float] = (),
    advantage: float = 0.0,
    weight: float = 0.0,
) -> Datum:
    """A sampled completion, with the sampler's log-probs of its tokens if they are known. Its advantage and the weight
    of each of its tokens in the loss are the same for all of them."""
    datum = Datum.completion(prompt, completion, advantages=advantage, weights=weight)
    if rollout_logprobs:
        datum.values["rollout_logprobs"] = rollout_logprobs
    return datum


def weigh_by_token(data: Sequence[Datum], minibatches: int = 1) -> None:
    """Sets the weights of all targets to the same value, which makes the loss the mean over them: over those of a
    minibatch, if the data are cut into several."""
    weight = minibatches / max(1, sum(len(datum.targets) for datum in data))
    for datum in data:
        datum.values["weights"] = weight


def idle_datum(like: Datum) -> Datum:
    """A datum with the values of another by name, all 0, which a rank without work computes so that collectives match
    those of the other ranks."""

    def zero(value: Value) -> Value:
        return torch.zeros(1, *value.shape[1:], dtype=value.dtype) if isinstance(value, Tensor) else 0.0

    return Datum([1, 1], [1], {name: zero(value) for name, value in like.values.items()})


def shared_names(data: Sequence[Datum]) -> list[str]:
    """The values that all of these data have. A loss reads no others: it is called on some of the data at a time, and
    has to find the same values in all of them."""
    return [name for name in data[0].values if all(name in datum.values for datum in data)]


def per_target(
    data: Sequence[Datum], names: Sequence[str], sequence: Tensor, device: torch.device
) -> Mapping[str, Tensor]:
    """Name -> the values of all targets of these data [P, ...]. `sequence`: [P], the datum of each target."""
    return {name: _gather(name, data, sequence, device) for name in names}


def _gather(name: str, data: Sequence[Datum], sequence: Tensor, device: torch.device) -> Tensor:
    values = [datum.values[name] for datum in data]
    if all(isinstance(value, float | int) for value in values):
        return torch.tensor(values, dtype=torch.float32).to(device, non_blocking=True)[sequence]
    for value, datum in zip(values, data, strict=True):
        if not isinstance(value, float | int) and len(value) != len(datum.targets):
            raise ValueError(f"the value `{name}` of a datum has {len(value)} entries for {len(datum.targets)} targets")
    if all(isinstance(value, Tensor) for value in values):
        return torch.cat([value for value in values if isinstance(value, Tensor)]).to(device)
    flat: list[float] = []
    for value, datum in zip(values, data, strict=True):
        if isinstance(value, float | int):
            flat += [value] * len(datum.targets)
        else:
            flat += value.tolist() if isinstance(value, Tensor) else value
    return torch.tensor(flat, dtype=torch.float32).to(device, non_blocking=True)
