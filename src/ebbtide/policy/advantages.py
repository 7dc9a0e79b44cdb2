"""Computes advantages from rewards: of samples, both [prompts, samples], or of their turns."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Literal

import torch
from torch import Tensor

EPSILON = 1e-6  # Keeps almost equal rewards from giving huge advantages; the usual value of GRPO implementations.

Kind = Literal["group_std", "group_mean", "rloo", "reinforce_pp"]


def compute_advantages(rewards: Tensor, kind: Kind) -> Tensor:
    """The advantages [prompts, samples] of rewards [prompts, samples]."""
    group_mean = rewards.mean(1, keepdim=True)  # [prompts, 1]
    if kind == "group_mean":
        return _zero_where_equal(rewards - group_mean, rewards)
    if kind == "group_std":
        return _zero_where_equal((rewards - group_mean) / (rewards.std(1, keepdim=True) + EPSILON), rewards)
    if kind == "rloo":
        # r - mean of the others = (r - mean of all) * n / (n - 1)
        samples = rewards.shape[1]
        return _zero_where_equal((rewards - group_mean) * (samples / (samples - 1)), rewards)
    centred = (rewards - rewards.mean()) / (rewards.std(correction=0) + EPSILON)
    return _zero_where_equal(centred.view(1, -1), rewards.view(1, -1)).view_as(rewards)


def turn_advantages(rewards: Sequence[Sequence[Sequence[float]]], kind: Kind) -> list[list[list[float]]]:
    """The advantages [prompts][samples][turns] of rewards of turns, which may differ in number. A turn is worth what
    its sample gains from it on, and is compared with the same turn of the others in its group that have one."""
    to_go = [[list(accumulate(reversed(turns)))[::-1] for turns in group] for group in rewards]
    found = [[[0.0] * len(turns) for turns in group] for group in to_go]
    for turn in range(max((len(turns) for group in to_go for turns in group), default=0)):
        members = [[(g, s) for s, turns in enumerate(group) if turn < len(turns)] for g, group in enumerate(to_go)]
        for compared in [list(chain(*members))] if kind == "reinforce_pp" else members:
            if len(compared) > 1:  # alone, a turn has nothing to be compared with
                worth = torch.tensor([[to_go[g][s][turn] for g, s in compared]], dtype=torch.float64)
                for (g, s), value in zip(compared, compute_advantages(worth, kind)[0].tolist(), strict=True):
                    found[g][s][turn] = value
    return found


def _zero_where_equal(values: Tensor, rewards: Tensor) -> Tensor:
    """The values, with exactly 0 in rows whose rewards are all equal: the rounding of a mean is no signal."""
    flat = (rewards == rewards[:, :1]).all(1, keepdim=True)
    return torch.where(flat, 0.0, values)
