"""The losses, one file each, and how the configured loss is assembled from them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ebbtide.config.loss import LossConfig
from ebbtide.policy.losses.cispo import cispo
from ebbtide.policy.losses.grpo import grpo
from ebbtide.policy.losses.gspo import gspo
from ebbtide.policy.losses.importance_sampling import importance_weights
from ebbtide.policy.losses.kl import kl_estimate

CLIPS = {"grpo": (0.2, 0.2), "gspo": (3e-4, 4e-4), "cispo": (1.0, 0.28)}  # (low, high) as each method's paper uses them


@dataclass(frozen=True)
class LossInputs:
    """The inputs of a loss from a micro-batch: P completion tokens of S sequences."""

    logprobs: Tensor  # [P], with gradient
    entropies: Tensor  # [P], with gradient
    old_logprobs: Tensor | None  # [P]; None: the only update on the batch, whose own log-probs are the old ones
    rollout_logprobs: Tensor  # [P]
    reference_logprobs: Tensor | None  # [P]; None: no KL penalty
    advantages: Tensor  # [P]
    weights: Tensor  # [P]: weight of each token in the loss
    sequence: Tensor  # [P]: which sequence each token belongs to, 0 .. S-1
    sequences: int  # S


def policy_loss(config: LossConfig, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """(the micro-batch's part of the loss, a scalar; sums over tokens to report). Both are summed over
    micro-batches."""
    low, high = CLIPS[config.kind]
    low, high = config.clip_low or low, config.clip_high or high
    old = inputs.old_logprobs if inputs.old_logprobs is not None else inputs.logprobs.detach()
    if config.kind == "grpo":
        per_token, cut = grpo(inputs.logprobs, old, inputs.advantages, low, high)
    elif config.kind == "gspo":
        per_token, cut = gspo(inputs.logprobs, old, inputs.advantages, inputs.sequence, inputs.sequences, low, high)
    else:
        per_token, cut = cispo(inputs.logprobs, old, inputs.advantages, low, high)
    if config.importance_sampling is not None:
        per_token = per_token * importance_weights(old, inputs.rollout_logprobs, config.importance_sampling.cap)
    if config.entropy:
        per_token = per_token - config.entropy * inputs.entropies
    reported = {"clip_fraction": cut.float().sum()}
    if config.kl is not None:
        assert inputs.reference_logprobs is not None  # The loop computes them whenever the config has a KL penalty.
        penalty = kl_estimate(inputs.logprobs, inputs.reference_logprobs, config.kl.estimator)
        per_token = per_token + config.kl.coefficient * penalty
        reported["kl"] = penalty.detach().sum()
    return (per_token * inputs.weights).sum(), reported


def mismatch(trainer_logprobs: Tensor, rollout_logprobs: Tensor) -> dict[str, Tensor]:
    """How far the sampler's log-probs [P] are from the trainer's [P]: sums over tokens, and the maximum."""
    difference = trainer_logprobs.detach() - rollout_logprobs
    return {
        "mismatch": difference.abs().sum(),
        "mismatch_kl": (difference.exp() - 1 - difference).sum(),
        "mismatch_max": difference.abs().max() if difference.numel() else torch.zeros((), device=difference.device),
    }
