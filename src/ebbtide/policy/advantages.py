"""Computes advantages from rewards: of samples, both [prompts, samples], or of their turns."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Literal

import torch
from torch import Tensor

EPSILON = 1e-6  # Keeps almost equal rewards from giving huge advantages; the usual value of GRPO implementations.

LEAST_VARIANCE = 1e-8  # Of what is whitened over tokens, as in OpenRLHF, the authors' own code of REINFORCE++.

Kind = Literal["group_std", "group_mean", "rloo", "reinforce_pp", "reinforce_pp_baseline"]


def compute_advantages(rewards: Tensor, kind: Kind, tokens: Tensor | None = None) -> Tensor:
    """The advantages [prompts, samples] of rewards [prompts, samples]. `tokens`: [prompts, samples], how often each
    sample counts in the mean and the standard deviation of the batch; None is once."""
    group_mean = rewards.mean(1, keepdim=True)  # [prompts, 1]
    if kind == "group_mean":
        return _zero_where_equal(rewards - group_mean, rewards)
    if kind == "group_std":
        return _zero_where_equal((rewards - group_mean) / (rewards.std(1, keepdim=True) + EPSILON), rewards)
    if kind == "rloo":
        # r - mean of the others = (r - mean of all) * n / (n - 1)
        samples = rewards.shape[1]
        return _zero_where_equal((rewards - group_mean) * (samples / (samples - 1)), rewards)
    if kind == "reinforce_pp_baseline":
        rewards = _zero_where_equal(rewards - group_mean, rewards)
        if tokens is None:  # Their mean is 0: what is left of it is rounding.
            return rewards / (rewards.std(correction=0) + EPSILON)
    if tokens is not None:
        return whiten(rewards, tokens)
    centred = (rewards - rewards.mean()) / (rewards.std(correction=0) + EPSILON)
    return _zero_where_equal(centred.view(1, -1), rewards.view(1, -1)).view_as(rewards)


def compute_known_advantages(rewards: Tensor, known: Tensor, kind: Kind, tokens: Tensor | None = None) -> Tensor:
    """The same where only some rewards are `known` [prompts, samples]: those are compared with each other, and the
    others have advantage 0."""
    if known.all():
        return compute_advantages(rewards, kind, tokens)
    found = torch.zeros_like(rewards)
    if kind != "reinforce_pp":
        within: Kind = "group_mean" if kind == "reinforce_pp_baseline" else kind
        for row, values, mask in zip(found, rewards, known, strict=True):
            if mask.sum() > 1:  # alone, a sample has nothing to be compared with
                row[mask] = compute_advantages(values[mask][None], within)[0]
    if kind.startswith("reinforce_pp") and known.any():
        counts = None if tokens is None else tokens[known][None]
        compared = rewards if kind == "reinforce_pp" else found
        found[known] = compute_advantages(compared[known][None], kind, counts)[0]
    return found


def whiten(values: Tensor, counts: Tensor) -> Tensor:
    """Values with mean 0 and variance 1, where each counts as often as `counts` says. Values that are all equal become
    0."""
    total = counts.sum()
    if total == 0 or (values == values.flatten()[0]).all():
        return torch.zeros_like(values)
    centred = values - (values * counts).sum() / total
    return centred * ((centred.square() * counts).sum() / total).clamp(min=LEAST_VARIANCE).rsqrt()


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
