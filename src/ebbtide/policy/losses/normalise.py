"""The weight of each token in the loss. It is set for a whole step before packing, so that losses of micro-batches are
summed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal


def token_weights(
    lengths: Sequence[int],  # [N]: completion tokens of every sequence of a step, with or without a signal
    normalise: Literal["sequence", "token", "constant"],
    max_new_tokens: int,
) -> list[float]:
    """The weight of the tokens of each sequence [N], in a step of one update. The loss is the weighted sum over all
    tokens; with several minibatches these weights are multiplied by their number."""
    if not lengths:  # Every completion of the step was truncated and masked.
        return []
    if normalise == "sequence":
        return [1 / (length * len(lengths)) for length in lengths]
    if normalise == "token":
        return [1 / sum(lengths)] * len(lengths)
    return [1 / (len(lengths) * max_new_tokens)] * len(lengths)
