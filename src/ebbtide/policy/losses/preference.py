"""The losses of pairs, by their margin: how much more the policy than the reference prefers the better completion."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ebbtide.policy.losses import LossInputs, Metrics, Ratio


def preference_loss(
    inputs: LossInputs, *, kind: Literal["sigmoid", "ipo"], beta: float, label_smoothing: float = 0.0
) -> tuple[Tensor, Metrics]:
    """The loss of the pairs of a micro-batch: its sequences are the better and the worse side of each, in turn. The
    value `weights` of a side is the weight of its pair."""
    if None in inputs.groups or inputs.groups[0::2] != inputs.groups[1::2]:
        raise ValueError("a preference loss needs pairs: two data of each `group`, the better one first")
    ratios = inputs.sequence_sum(inputs.logprobs - inputs["reference_logprobs"])  # [S]
    lengths = inputs.sequence_sum(torch.ones_like(inputs.logprobs))
    weights = (inputs.sequence_sum(inputs["weights"]) / lengths).view(-1, 2)[:, 0]  # [pairs]
    chosen, rejected = (beta * ratios).view(-1, 2).unbind(1)  # [pairs]: implicit rewards
    if kind == "ipo":  # by the mean per token, as the sum would grow with the length
        means = (ratios / lengths).view(-1, 2)
        losses = (means[:, 0] - means[:, 1] - 1 / (2 * beta)).square()
    else:
        margin = chosen - rejected
        losses = -(1 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)
    margins, pairs = (chosen - rejected).detach(), torch.ones_like(weights).sum()
    figures = {
        "accuracy": (margins > 0).float(),
        "margin": margins,
        "reward_chosen": chosen.detach(),
        "reward_rejected": rejected.detach(),
    }
    return (losses * weights).sum(), {name: Ratio(values.sum(), pairs) for name, values in figures.items()}
