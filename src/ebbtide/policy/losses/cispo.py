"""CISPO: REINFORCE weighted by a clipped, detached ratio. Every token keeps its gradient; clipping only limits its
weight."""

from __future__ import annotations

from torch import Tensor


def cispo(
    logprobs: Tensor,  # [P]
    old_logprobs: Tensor,  # [P]
    advantages: Tensor,  # [P]: the advantage of the token's sequence
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, Tensor]:
    """(loss of each token [P], whether its ratio was clipped [P])."""
    ratio = (logprobs.detach() - old_logprobs).exp()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -weight * advantages * logprobs, ratio != weight
