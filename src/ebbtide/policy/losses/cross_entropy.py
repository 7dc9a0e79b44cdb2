"""The loss of SFT: the cross-entropy of the targets."""

from __future__ import annotations

from torch import Tensor

from ebbtide.policy.losses import LossInputs


def cross_entropy(inputs: LossInputs) -> Tensor:
    """The negative log-probs of the targets, weighted."""
    return -(inputs.logprobs * inputs["weights"]).sum()
