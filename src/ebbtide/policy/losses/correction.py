"""Truncated importance sampling: the sampler and the trainer give one token slightly different probabilities."""

from __future__ import annotations

from torch import Tensor


def correction(
    trainer_logprobs: Tensor,  # [P]: under the weights that sampled, by the trainer's forward
    rollout_logprobs: Tensor,  # [P]: as the sampler saw them
    cap: float,
) -> Tensor:
    """The weight of each token [P]: p_trainer / p_rollout, at most `cap`, without gradient."""
    return (trainer_logprobs.detach() - rollout_logprobs).exp().clamp(max=cap)
