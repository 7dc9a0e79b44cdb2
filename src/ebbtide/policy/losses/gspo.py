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
) -> tuple[Tensor, Tensor]:
    """(loss of each token [P], which is that of its sequence; whether clipping removed its gradient [P])."""
    zeros = torch.zeros(sequences, dtype=logprobs.dtype, device=logprobs.device)
    lengths = zeros.index_add(0, sequence, torch.ones_like(logprobs))  # [S]
    mean_difference = zeros.index_add(0, sequence, logprobs - old_logprobs) / lengths  # [S]
    return grpo(mean_difference[sequence], torch.zeros_like(logprobs), advantages, clip_low, clip_high)
