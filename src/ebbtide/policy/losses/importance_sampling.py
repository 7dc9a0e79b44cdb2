"""Truncated importance sampling, for the mismatch between the probabilities of the sampler and of the trainer."""

from __future__ import annotations

from torch import Tensor


def importance_weights(
    trainer_logprobs: Tensor,  # [P]: by the trainer's forward, before the first update on the batch
    rollout_logprobs: Tensor,  # [P]: by the sampler
    cap: float,
) -> Tensor:
    """The weight of each token [P]: p_trainer / p_rollout, at most `cap`, without gradient."""
    return (trainer_logprobs.detach() - rollout_logprobs).exp().clamp(max=cap)
