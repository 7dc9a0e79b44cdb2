"""CISPO: REINFORCE weighted by a clipped, detached ratio. No token loses its gradient; large ratios only count less."""

from __future__ import annotations

from torch import Tensor


def cispo(
    logprobs: Tensor,  # [P]
    old_logprobs: Tensor,  # [P]
    advantages: Tensor,  # [P]: that of the token's sequence
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, Tensor]:
    """Loss of each token [P], and whether its ratio was clipped [P]."""
    ratio = (logprobs.detach() - old_logprobs).exp()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -weight * advantages * logprobs, ratio != weight
