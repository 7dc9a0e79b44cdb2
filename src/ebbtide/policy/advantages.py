"""From rewards to advantages. `rewards` is [prompts, samples]; so is what comes back."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

EPSILON = 1e-6  # keeps a group of almost equal rewards from being blown up; the value that GRPO implementations share

Kind = Literal["group_std", "group_mean", "rloo", "reinforce_pp"]


def advantages(rewards: Tensor, kind: Kind) -> Tensor:
    group_mean = rewards.mean(1, keepdim=True)  # [prompts, 1]
    if kind == "group_mean":
        return _without_dust(rewards - group_mean, rewards)
    if kind == "group_std":
        return _without_dust((rewards - group_mean) / (rewards.std(1, keepdim=True) + EPSILON), rewards)
    if kind == "rloo":
        # r - mean of the others = (r - mean of all) * n / (n - 1)
        samples = rewards.shape[1]
        return _without_dust((rewards - group_mean) * (samples / (samples - 1)), rewards)
    centred = (rewards - rewards.mean()) / (rewards.std(correction=0) + EPSILON)
    return _without_dust(centred.view(1, -1), rewards.view(1, -1)).view_as(rewards)


def _without_dust(values: Tensor, rewards: Tensor) -> Tensor:
    """Exactly 0 in a row whose rewards are all equal: the rounding of a mean must not pass for a signal."""
    flat = (rewards == rewards[:, :1]).all(1, keepdim=True)
    return torch.where(flat, 0.0, values)
