"""The losses of distillation: how far the policy's distribution is from a teacher's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from ebbtide.policy.divergence import token_divergences
from ebbtide.policy.head import Head
from ebbtide.policy.losses import LossInputs, LossValues, Metrics


@dataclass(frozen=True)
class VocabularyDivergence:
    """The divergence over the whole vocabulary. The data have the teacher's hidden states (`teacher_hidden`)."""

    teacher_head: Callable[[], Head]
    """Returns the teacher's output head when it is on the device."""
    beta: float
    chunk: int

    def head(self, hidden: Tensor, head: Head, targets: Tensor, values: Mapping[str, Tensor]) -> LossValues:
        """Computes the divergence of each target where the log-probs are computed otherwise."""
        found = token_divergences(
            hidden, head, targets, values["teacher_hidden"], self.teacher_head(), beta=self.beta, chunk=self.chunk
        )
        return {"logprobs": found.logprobs, "entropies": found.entropies, "divergences": found.divergences}

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, Metrics]:
        divergences = inputs["divergences"]
        return (divergences * inputs["weights"]).sum(), {"kl": divergences.detach().sum()}


def sampled_divergence(inputs: LossInputs) -> tuple[Tensor, Metrics]:
    """The reverse KL from sampled tokens alone: a policy gradient, in which the advantage of a token is how much more
    likely the teacher finds it than the policy. The data have `teacher_logprobs`."""
    logprobs, now = inputs.logprobs, inputs.logprobs.detach()
    difference = now - inputs["teacher_logprobs"]
    # The ratio is 1, and its gradient is that of the log-prob.
    return ((logprobs - now).exp() * difference * inputs["weights"]).sum(), {"kl": difference.sum()}
