"""Computes advantages from rewards; both are [prompts, samples]."""

from __future__ import annotations

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


def _zero_where_equal(values: Tensor, rewards: Tensor) -> Tensor:
    """The values, with exactly 0 in rows whose rewards are all equal: the rounding of a mean is no signal."""
    flat = (rewards == rewards[:, :1]).all(1, keepdim=True)
    return torch.where(flat, 0.0, values)
