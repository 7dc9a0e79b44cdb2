"""GSPO: one ratio for the whole sequence, the geometric mean of its tokens' ratios, clipped once."""

from __future__ import annotations

import torch
from torch import Tensor


def gspo(
    logprobs: Tensor,  # [P]
    old_logprobs: Tensor,  # [P]
    advantages: Tensor,  # [P]: that of the token's sequence
    sequence: Tensor,  # [P]: which sequence each token belongs to, 0 .. S-1
    sequences: int,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, Tensor]:
    """Loss of each token [P] (its sequence's loss), and whether the clip took the gradient away [P]."""
    zeros = torch.zeros(sequences, dtype=logprobs.dtype, device=logprobs.device)
    lengths = zeros.index_add(0, sequence, torch.ones_like(logprobs))  # [S]
    mean_difference = zeros.index_add(0, sequence, logprobs - old_logprobs) / lengths  # [S]
    ratio = mean_difference.exp()[sequence]  # [P]
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = -torch.minimum(ratio * advantages, clipped * advantages)
    cut = ((ratio > 1 + clip_high) & (advantages > 0)) | ((ratio < 1 - clip_low) & (advantages < 0))
    return loss, cut
