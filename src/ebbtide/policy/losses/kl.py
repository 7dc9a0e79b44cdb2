"""Estimates of KL(policy || reference) from the log-probs of sampled tokens."""

from __future__ import annotations

from typing import Literal

from torch import Tensor


def kl_estimate(
    logprobs: Tensor,  # [P]
    reference_logprobs: Tensor,  # [P]
    estimator: Literal["k1", "k2", "k3"],
) -> Tensor:
    """The estimate for each token [P]. With d = log p - log p_ref: k1 = d, k2 = d^2 / 2, k3 = exp(-d) + d - 1."""
    d = logprobs - reference_logprobs
    if estimator == "k1":
        return d
    if estimator == "k2":
        return d.square() / 2
    return (-d).exp() + d - 1
