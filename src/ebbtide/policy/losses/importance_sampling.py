"""Importance sampling for the mismatch between the probabilities of the sampler and of the trainer: TIS, MIS, IcePop
and what lies between them, as a level, a mode and a band."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ebbtide.config.loss import ImportanceSamplingConfig

LARGEST = 80.0  # Of a logarithm whose exponential is finite in float32.


def importance_weights(
    trainer_logprobs: Tensor,  # [P]: by the trainer's forward, before the first update on the batch
    rollout_logprobs: Tensor,  # [P]: by the sampler
    sequence: Tensor,  # [P]: which sequence each token belongs to, 0 .. S-1
    sequences: int,
    config: ImportanceSamplingConfig,
    default: Literal["token", "sequence"] = "token",
) -> tuple[Tensor, Tensor]:
    """(the weight of each token [P], without gradient; whether its ratio is outside the band [P]). `default`: the level
    where the config leaves it open."""
    logs, level = trainer_logprobs.detach() - rollout_logprobs, config.level or default
    if level != "token":
        zeros = torch.zeros(sequences, dtype=logs.dtype, device=logs.device)
        sums = zeros.index_add(0, sequence, logs)  # [S]
        if level == "geometric":
            sums = sums / zeros.index_add(0, sequence, torch.ones_like(logs))
        logs = sums[sequence]
    ratios = logs.clamp(-LARGEST, LARGEST).exp()
    low = 0.0 if config.mode == "truncate" else config.lower_bound
    outside = (ratios < low) | (ratios > config.upper_bound)
    if config.mode == "mask":
        return ratios.masked_fill(outside, 0.0), outside
    return ratios.clamp(low, config.upper_bound), outside
