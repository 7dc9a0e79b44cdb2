"""The losses, one file each, and how the configured loss is assembled from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Literal, Protocol

import torch
from torch import Tensor

from ebbtide.config.loss import LossConfig
from ebbtide.errors import UserError
from ebbtide.policy.head import Head
from ebbtide.policy.losses.cispo import cispo
from ebbtide.policy.losses.grpo import grpo
from ebbtide.policy.losses.gspo import gspo, sequence_mean
from ebbtide.policy.losses.importance_sampling import importance_weights
from ebbtide.policy.losses.kl import kl_estimate

CLIPS = {"grpo": (0.2, 0.2), "gspo": (3e-4, 4e-4), "cispo": (1.0, 0.28)}  # (low, high) as each method's paper uses them


Metrics = Mapping[str, "Tensor | Ratio"]
"""What a loss reports of a micro-batch: sums over its targets, which become means per target; or ratios."""


@dataclass(frozen=True)
class Ratio:
    """A metric that is no mean over targets: both parts are summed over micro-batches and ranks, then divided."""

    total: Tensor
    count: Tensor


@dataclass(frozen=True)
class LossInputs:
    """The inputs of a loss from a micro-batch: P targets of S sequences."""

    logprobs: Tensor  # [P], with gradient
    entropies: Tensor  # [P], with gradient
    values: Mapping[str, Tensor]  # name -> [P, ...]: the values of the data
    sequence: Tensor  # [P]: which sequence each target belongs to, 0 .. S-1
    sequences: int  # S
    groups: Sequence[int | None]  # [S]: the group of each sequence

    def __getitem__(self, name: str) -> Tensor:
        """The values [P, ...] of this name."""
        if name not in self.values:
            raise KeyError(f"not all data have the value `{name}`; all have: {', '.join(self.values) or 'none'}")
        return self.values[name]

    def sequence_sum(self, per_target: Tensor) -> Tensor:
        """[P] -> [S]: the sum over each sequence."""
        zeros = torch.zeros(self.sequences, dtype=per_target.dtype, device=per_target.device)
        return zeros.index_add(0, self.sequence, per_target)


Loss = Callable[[LossInputs], "Tensor | tuple[Tensor, Metrics]"]
"""A loss: the micro-batch's part of it, a scalar, and what to report. Both are summed over micro-batches."""


class LossHead(Protocol):
    """What a loss that needs more of the logits than log-probs has as its attribute `head`."""

    def __call__(self, hidden: Tensor, head: Head, targets: Tensor, values: Mapping[str, Tensor], /) -> LossValues:
        """Computes what the loss needs of each target, from the hidden states before the targets [P, H], the policy's
        output head, the targets [P] and the values of the data: by name, `logprobs` and `entropies` [P] at least."""
        ...


LossValues = dict[str, Tensor]
"""Name -> [P, ...]."""


def loss_head(loss: Loss | None) -> LossHead | None:
    """The attribute `head` of a loss; None where it has none, and the policy computes the log-probs."""
    found: LossHead | None = getattr(loss, "head", None)
    return found


@dataclass(frozen=True)
class PolicyLoss:
    """The loss that a config describes."""

    config: LossConfig
    custom: Loss | None = None
    """Computes the loss of each target, instead of the clipped ratio."""

    @property
    def head(self) -> LossHead | None:
        return loss_head(self.custom)

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, Metrics]:
        return policy_loss(self.config, inputs, self.custom)


def build_loss(config: LossConfig) -> PolicyLoss:
    """The policy loss that the config describes."""
    return PolicyLoss(config, _import_loss(config.kind) if ":" in config.kind else None)


def policy_loss(config: LossConfig, inputs: LossInputs, custom: Loss | None = None) -> tuple[Tensor, Metrics]:
    """The clipped ratio of `loss.kind`, or another loss for each target (`custom`), with importance sampling, the
    entropy bonus and the KL penalty."""
    logprobs, advantages = inputs.logprobs, inputs["advantages"]
    if config.old_logprobs == "rollout":
        old = inputs["rollout_logprobs"]
    else:  # With one update per batch, the log-probs of this forward are the old ones.
        old = inputs.values.get("old_logprobs", logprobs.detach())
    reported: dict[str, Tensor | Ratio] = {}
    if custom is not None:
        found = custom(inputs)
        per_token, more = found if isinstance(found, tuple) else (found, {})
        if per_token.shape != logprobs.shape:
            raise UserError(
                f"`loss.kind: {config.kind}` returned a tensor of shape {tuple(per_token.shape)}: it has to return the"
                f" loss of each target, {tuple(logprobs.shape)}, which is then weighted and summed"
            )
        reported |= more
    else:
        low, high = CLIPS[config.kind]
        low, high = config.clip_low or low, config.clip_high or high
        if config.kind == "grpo":
            per_token, cut = grpo(logprobs, old, advantages, low, high, config.clip_ratio_c)
        elif config.kind == "gspo":
            per_token, cut = gspo(
                logprobs, old, advantages, inputs.sequence, inputs.sequences, low, high, config.clip_ratio_c
            )
        else:
            per_token, cut = cispo(logprobs, old, advantages, low, high)
        reported["clip_fraction"] = cut.float().sum()
    if config.importance_sampling is not None:
        weights, outside = importance_weights(
            old,
            inputs["rollout_logprobs"],
            inputs.sequence,
            inputs.sequences,
            config.importance_sampling,
            default="sequence" if config.kind == "gspo" else "token",
        )
        per_token = per_token * weights
        reported["importance_outside"] = outside.float().sum()
    if config.entropy:
        per_token = per_token - config.entropy * inputs.entropies
    if config.kl is not None:
        penalty = kl_estimate(logprobs, inputs["reference_logprobs"], config.kl.estimator)
        reported["kl"] = penalty.detach().sum()
        if config.kl.importance_ratio is not None:
            penalty = penalty * _kl_ratio(config, config.kl.importance_ratio, inputs, old)
        if not config.kl.in_reward:
            per_token = per_token + config.kl.coefficient * penalty
    return (per_token * inputs["weights"]).sum(), reported


def _kl_ratio(
    config: LossConfig, kind: Literal["old", "current", "rollout"], inputs: LossInputs, old: Tensor
) -> Tensor:
    """The ratio [P], with gradient, by which the KL estimate is multiplied: without it, the gradient of an estimate
    ignores that the policy also decides which tokens are sampled."""
    logprobs = inputs.logprobs
    if kind == "current":
        return (logprobs - logprobs.detach()).exp()
    logs = logprobs - (old if kind == "old" else inputs["rollout_logprobs"])
    if kind == "old" and config.kind == "gspo":  # the ratio of its loss
        logs = sequence_mean(logs, inputs.sequence, inputs.sequences)
    return logs.exp()


def _import_loss(name: str) -> Loss:
    """The function that `module:function` names."""
    module, _, attribute = name.partition(":")
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"`loss.kind: {name}` cannot be imported: {error}") from None
    if not callable(found):
        raise UserError(f"`loss.kind: {name}` is a {type(found).__name__}, and should be a function of LossInputs")
    loss: Loss = found
    return loss


def mismatch(trainer_logprobs: Tensor, rollout_logprobs: Tensor) -> dict[str, Tensor]:
    """How far the sampler's log-probs [P] are from the trainer's [P]: sums over tokens, and the maximum."""
    difference = trainer_logprobs.detach() - rollout_logprobs
    return {
        "mismatch": difference.abs().sum(),
        "mismatch_kl": (difference.exp() - 1 - difference).sum(),
        "mismatch_max": difference.abs().max() if difference.numel() else torch.zeros((), device=difference.device),
    }
