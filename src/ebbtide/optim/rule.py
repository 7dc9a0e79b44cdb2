"""The rule of AdamW for a stretch of one parameter, in plain torch; `kernels.py` has it for a GPU, `native.c` for many CPU cores.

A 16-bit weight is its fp32 master rounded to the nearest, ties to even. The master is not stored: the weight holds its upper half, and only the lower
16 bits are kept beside it, as `low`. That is exact. Where the lower half is above the middle the weight was rounded up; where it is exactly
the middle it may have been rounded either way, and the sign of the second moment, which is never negative, remembers which.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ebbtide.config.tree import Optimizer as OptimizerConfig
from ebbtide.optim.layout import Segment

MIDDLE = 0x8000  # of the lower 16 bits
MIX = ((16, 0x7FEB352D), (15, 0x846CA68B))  # shifts and factors of a hash of 32 bits


@dataclass(frozen=True)
class Rule:
    """One step for one parameter: everything but the tensors."""

    config: OptimizerConfig
    lr: float
    decay: float
    step: int
    """How many steps this parameter has taken, this one among them."""
    scale: float
    """Of the gradient: what the clip leaves of it."""
    parameter: int = 0
    """Its number: with the step it fixes the noise of stochastic rounding."""

    @property
    def shrink(self) -> float:
        """What weight decay leaves of a weight."""
        return 1 - self.lr * self.decay

    @property
    def step_size(self) -> float:
        return self.lr / (1 - self.config.betas[0] ** self.step)

    @property
    def root(self) -> float:
        """The root of the second moment's correction."""
        return math.sqrt(1 - self.config.betas[1] ** self.step)

    @cached_property
    def key(self) -> int:
        """Seeds the noise of this step: 32 bits, mixed, so that no parameter's noise is another's at another place."""
        x = (self.parameter * 0xC2B2AE3D + self.step * 0x85EBCA77 + 1) & 0xFFFFFFFF
        for shift, factor in MIX:
            x = (x ^ (x >> shift)) * factor & 0xFFFFFFFF
        return x ^ (x >> 16)

    @property
    def stochastic(self) -> bool:
        return self.config.state_dtype == "bfloat16_stochastic"


@dataclass(frozen=True)
class State:
    """The state of a stretch, flat."""

    low: Tensor | None
    """int16: the lower half of the master; None where the weight is fp32 and its own master."""
    first: Tensor
    second: Tensor
    """Its sign is a bit of the master, where there is `low`."""

    def part(self, start: int, stop: int) -> State:
        return State(None if self.low is None else self.low[start:stop], self.first[start:stop], self.second[start:stop])


class Stretch(NamedTuple):
    """A segment that is to be stepped, with its parameter's weights and gradient where they are."""

    segment: Segment
    weight: Tensor
    """Flat."""
    grad: Tensor
    """Contiguous."""
    first: int
    """Of the weights: their place in the whole parameter."""
    rule: Rule


def update(weight: Tensor, grad: Tensor, state: State, rule: Rule, start: int) -> None:
    """Steps a stretch in place, on a CPU. `start` is its first element's place in its parameter."""
    second = state.second if state.low is None else state.second.abs()
    master = weight if state.low is None else join(weight, state.low, state.second)
    adamw(master, grad, state.first, second, rule, start)
    if state.low is not None:
        state.second.copy_(divide(master, weight, state.low, second))


def adamw(master: Tensor, grad: Tensor, first: Tensor, second: Tensor, rule: Rule, start: int) -> None:
    """Steps a master and its moments in place, on a CPU."""
    first32, second32 = first.float(), second.float()  # themselves where they are fp32
    torch._fused_adamw_(
        [master],
        [grad.float() * rule.scale],
        [first32],
        [second32],
        [],
        [torch.tensor(float(rule.step))],
        lr=rule.lr,
        beta1=rule.config.betas[0],
        beta2=rule.config.betas[1],
        weight_decay=rule.decay,
        eps=rule.config.eps,
        amsgrad=False,
        maximize=False,
    )
    if first32 is not first:
        bits = noise(len(first), start, rule.key) if rule.stochastic else None
        first.copy_(first32 if bits is None else rounded(first32, bits & 0xFFFF))
        second.copy_(second32 if bits is None else rounded(second32, bits >> 16))


def join(weight: Tensor, low: Tensor, second: Tensor) -> Tensor:
    """The fp32 master of a bfloat16 weight."""
    lower = low.int() & 0xFFFF
    up = (lower > MIDDLE) | ((lower == MIDDLE) & second.signbit())
    return (((weight.view(torch.int16).int() - up.int()) << 16) | lower).view(torch.float32)


def divide(master: Tensor, weight: Tensor, low: Tensor, second: Tensor) -> Tensor:
    """Writes a master into its weight and lower half; gives the second moment with the bit that they have no room for."""
    bits = master.view(torch.int32)
    weight.copy_(master)
    low.copy_(bits & 0xFFFF)
    up = (low == -MIDDLE) & ((bits >> 16) & 1 == 1)  # from the middle, to the even neighbour above
    return torch.where(up, -second, second)


def noise(size: int, start: int, key: int) -> Tensor:
    """32 random bits for each element from `start` on: a hash of its place, the same in any chunk and on any device."""
    x = torch.arange(start, start + size) * 0x9E3779B1 + key & 0xFFFFFFFF
    for shift, factor in MIX:
        x = (x ^ (x >> shift)) * factor & 0xFFFFFFFF
    return x ^ (x >> 16)


def rounded(x: Tensor, bits: Tensor) -> Tensor:
    """fp32 to bfloat16, up or down as 16 random bits say: right on average."""
    return ((x.view(torch.int32) + bits.int()) & ~0xFFFF).view(torch.float32).bfloat16()
