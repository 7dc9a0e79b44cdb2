"""The AdamW update of a segment of one parameter, in plain torch; `gpu_kernels.py` has it for a GPU, `cpu_kernels.c`
for many CPU cores.

A 16-bit weight is its fp32 master rounded to the nearest, ties to even. The master is not stored: the weight has its
upper half, and only the lower 16 bits are stored in addition, as `low`. That is exact. Where the lower half is above
the middle, the weight was rounded up; where it is exactly the middle, it may have been rounded either way, and the sign
of the second moment, which is never negative, records which.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ebbtide.config.optimizer import OptimizerConfig
from ebbtide.optim.layout import Segment
from ebbtide.system.torch_internals import fused_adamw

MIDDLE = 0x8000  # the middle of the lower 16 bits
MIX = ((16, 0x7FEB352D), (15, 0x846CA68B))  # shifts and factors of a 32-bit hash


class Rule(NamedTuple):
    """One optimizer step of one parameter: everything but the tensors."""

    config: OptimizerConfig
    lr: float
    decay: float
    step: int
    """The number of steps this parameter has taken, this one included."""
    scale: float
    """The factor by which clipping scales the gradient."""
    parameter: int = 0
    """The parameter's number: with the step it determines the noise of stochastic rounding."""

    @property
    def shrink(self) -> float:
        """The factor by which weight decay scales a weight."""
        return 1 - self.lr * self.decay

    @property
    def step_size(self) -> float:
        return self.lr / (1 - self.config.betas[0] ** self.step)

    @property
    def root(self) -> float:
        """The square root of the second moment's bias correction."""
        return math.sqrt(1 - self.config.betas[1] ** self.step)

    @property
    def numbers(self) -> tuple[float, float, float, float]:
        """What a kernel computes with, besides the betas and epsilon."""
        return self.scale, self.shrink, self.step_size, self.root

    @property
    def key(self) -> int:
        """The seed of this step's noise: 32 bits, hashed, so that no parameter's noise is another's, shifted."""
        x = (self.parameter * 0xC2B2AE3D + self.step * 0x85EBCA77 + 1) & 0xFFFFFFFF
        for shift, factor in MIX:
            x = (x ^ (x >> shift)) * factor & 0xFFFFFFFF
        return x ^ (x >> 16)

    @property
    def stochastic(self) -> bool:
        return self.config.state_dtype == "bfloat16_stochastic"


@dataclass(frozen=True)
class AdamWState:
    """The state of some elements, flat."""

    low: Tensor | None
    """The lower half of the master, as int16; None where the weight is fp32 and its own master."""
    first: Tensor
    second: Tensor
    """The second moment; where there is `low`, its sign is a bit of the master."""

    def part(self, start: int, stop: int) -> AdamWState:
        return AdamWState(
            None if self.low is None else self.low[start:stop], self.first[start:stop], self.second[start:stop]
        )


class StepArgs(NamedTuple):
    """A segment to step, with its parameter's weights and gradient where they are."""

    segment: Segment
    weight: Tensor
    """This rank's shard of the parameter, flat."""
    grad: Tensor
    """The shard's gradient, contiguous."""
    first: int
    """The position of the shard's first element in the whole parameter."""
    rule: Rule


def update(weight: Tensor, grad: Tensor, state: AdamWState, rule: Rule, start: int) -> None:
    """Steps some elements in place, on a CPU. `start` is the first element's position in the parameter."""
    second = state.second if state.low is None else state.second.abs()
    master = weight if state.low is None else join_master(weight, state.low, state.second)
    adamw(master, grad, state.first, second, rule, start)
    if state.low is not None:
        state.second.copy_(split_master(master, weight, state.low, second))


def adamw(master: Tensor, grad: Tensor, first: Tensor, second: Tensor, rule: Rule, start: int) -> None:
    """Steps a master and its moments in place, on a CPU."""
    first32, second32 = first.float(), second.float()  # no copies where they are fp32
    fused_adamw(
        master,
        grad.float() * rule.scale,
        first32,
        second32,
        step=rule.step,
        lr=rule.lr,
        betas=rule.config.betas,
        weight_decay=rule.decay,
        eps=rule.config.eps,
    )
    if first32 is not first:
        bits = noise_bits(len(first), start, rule.key) if rule.stochastic else None
        first.copy_(first32 if bits is None else round_stochastic(first32, bits & 0xFFFF))
        second.copy_(second32 if bits is None else round_stochastic(second32, bits >> 16))


def join_master(weight: Tensor, low: Tensor, second: Tensor) -> Tensor:
    """Joins the fp32 master of a bfloat16 weight."""
    lower = low.int() & 0xFFFF
    up = (lower > MIDDLE) | ((lower == MIDDLE) & second.signbit())
    return (((weight.view(torch.int16).int() - up.int()) << 16) | lower).view(torch.float32)


def split_master(master: Tensor, weight: Tensor, low: Tensor, second: Tensor) -> Tensor:
    """Splits a master into its weight and lower half; returns the second moment with the rounding bit as its sign."""
    bits = master.view(torch.int32)
    weight.copy_(master)
    low.copy_(bits & 0xFFFF)
    up = (low == -MIDDLE) & ((bits >> 16) & 1 == 1)  # rounded from the middle to the even neighbour above
    return torch.where(up, -second, second)


def noise_bits(size: int, start: int, key: int) -> Tensor:
    """32 random bits for each element from `start` on: a hash of its position, the same in any chunk and on any
    device."""
    x = torch.arange(start, start + size) * 0x9E3779B1 + key & 0xFFFFFFFF
    for shift, factor in MIX:
        x = (x ^ (x >> shift)) * factor & 0xFFFFFFFF
    return x ^ (x >> 16)


def round_stochastic(x: Tensor, bits: Tensor) -> Tensor:
    """Rounds fp32 to bfloat16 stochastically, by 16 random bits: exact on average."""
    return ((x.view(torch.int32) + bits.int()) & ~0xFFFF).view(torch.float32).bfloat16()
