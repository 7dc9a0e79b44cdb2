"""GSPO: one ratio per sequence, the geometric mean of its tokens' ratios, clipped as in GRPO."""

from __future__ import annotations

import torch
from torch import Tensor

from ebbtide.policy.losses.grpo import grpo


def gspo(
    logprobs: Tensor,  # [P]
    old_logprobs: Tensor,  # [P]
    advantages: Tensor,  # [P]: the advantage of the token's sequence
    sequence: Tensor,  # [P]: which sequence each token belongs to, 0 .. S-1
    sequences: int,
    clip_low: float,
    clip_high: float,
    clip_ratio_c: float | None = None,
) -> tuple[Tensor, Tensor]:
    """(loss of each token [P], which is that of its sequence; whether clipping removed its gradient [P])."""
    mean_difference = sequence_mean(logprobs - old_logprobs, sequence, sequences)
    return grpo(mean_difference, torch.zeros_like(logprobs), advantages, clip_low, clip_high, clip_ratio_c)


def sequence_mean(values: Tensor, sequence: Tensor, sequences: int) -> Tensor:
    """[P] -> [P]: the mean over its sequence."""
    zeros = torch.zeros(sequences, dtype=values.dtype, device=values.device)
    lengths = zeros.index_add(0, sequence, torch.ones_like(values))  # [S]
    return (zeros.index_add(0, sequence, values) / lengths)[sequence]
