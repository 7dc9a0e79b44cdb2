"""GRPO: PPO's clipped ratio per token; asymmetric if `clip_high` differs from `clip_low` (DAPO's clip-higher).

Dual clip (https://arxiv.org/abs/1912.09729) also bounds a large ratio where the advantage is negative, as the plain
clip does not."""

from __future__ import annotations

import torch
from torch import Tensor


def grpo(
    logprobs: Tensor,  # [P]
    old_logprobs: Tensor,  # [P]
    advantages: Tensor,  # [P]: the advantage of the token's sequence
    clip_low: float,
    clip_high: float,
    clip_ratio_c: float | None = None,
) -> tuple[Tensor, Tensor]:
    """(loss of each token [P], whether clipping removed its gradient [P])."""
    ratio = (logprobs - old_logprobs).exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = -torch.minimum(ratio * advantages, clipped * advantages)
    cut = ((ratio > 1 + clip_high) & (advantages > 0)) | ((ratio < 1 - clip_low) & (advantages < 0))
    if clip_ratio_c is not None:
        beyond = (advantages < 0) & (-loss < clip_ratio_c * advantages)
        loss, cut = torch.where(beyond, -clip_ratio_c * advantages, loss), cut | beyond
    return loss, cut
