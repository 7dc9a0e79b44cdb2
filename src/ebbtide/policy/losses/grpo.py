"""GRPO: PPO's clipped ratio per token; asymmetric if `clip_high` differs from `clip_low` (DAPO's clip-higher)."""

from __future__ import annotations

import torch
from torch import Tensor


def grpo(
    logprobs: Tensor,  # [P]
    old_logprobs: Tensor,  # [P]
    advantages: Tensor,  # [P]: the advantage of the token's sequence
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, Tensor]:
    """(loss of each token [P], whether clipping removed its gradient [P])."""
    ratio = (logprobs - old_logprobs).exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = -torch.minimum(ratio * advantages, clipped * advantages)
    cut = ((ratio > 1 + clip_high) & (advantages > 0)) | ((ratio < 1 - clip_low) & (advantages < 0))
    return loss, cut
