"""Compares what an engine samples with the model's own forward of the same tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ebbtide.errors import UserError
from ebbtide.model.load import LoadedModel
from ebbtide.model.row_adapters import row_adapters
from ebbtide.policy.packed_check import tolerance
from ebbtide.policy.probe import ProbeSequence, own_logprobs
from ebbtide.rollout.engine import Completion, Request

# Nats that are allowed where the model's rounding cannot be measured: decode rounds differently from a forward of whole
# sequences, in every layer. In bfloat16 the difference was 0.03 to 0.06 nats in measured runs.
UNKNOWN = 0.25


def check_own(
    loaded: LoadedModel,
    requests: Sequence[Request],
    found: Sequence[Sequence[Completion]],
    refusal: Callable[[str], UserError],
) -> float:
    """Compares the first and the last sample of each prompt with the model's own forward. Returns the difference that
    is allowed, or raises a refusal."""
    model, adapters = loaded.model, row_adapters(loaded.model)
    own, sampled, allowed = [], [], []
    for request, group in zip(requests, found, strict=True):
        some = [group[0], group[-1]] if len(group) > 1 else group
        sequences = [ProbeSequence(request.prompt, one.tokens) for one in some]
        with adapters.chosen(torch.tensor([request.adapter], device=model.device)):
            mine = [own_logprobs(model, loaded.generate_attention, one) for one in sequences]
            if some:
                allowed.append(tolerance(model, loaded.generate_attention, sequences, mine, UNKNOWN))
        own += mine
        sampled += [plain_logprobs(one) for one in some]
    difference, most = (torch.cat(own).cpu() - torch.cat(sampled)).abs().mean().item(), max(allowed)
    if not difference <= most:
        raise refusal(
            f"its log-probs are {difference:.3g} nats from the model's own on average, which is more than rounding"
            f" ({most:.2g}): something in its attention or its layers is computed otherwise",
        )
    return most


def plain_logprobs(completion: Completion) -> Tensor:
    """The log-probs of a completion's tokens at temperature 1."""
    return torch.tensor(completion.plain_logprobs)
