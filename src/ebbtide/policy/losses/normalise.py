"""How much each token counts. Decided for a whole step before anything is packed, so that micro-batches only add up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal


def token_weights(
    lengths: Sequence[int],  # [N]: completion tokens of every sequence of a step, with or without a signal
    normalise: Literal["sequence", "token", "constant"],
    max_new_tokens: int,
) -> list[float]:
    """[N]: the weight of each token of each sequence, in a step of one update. The loss is the weighted sum over all tokens; of several minibatches each has as many times these weights."""
    if not lengths:  # every completion of the step was cut off and masked
        return []
    if normalise == "sequence":
        return [1 / (length * len(lengths)) for length in lengths]
    if normalise == "token":
        return [1 / sum(lengths)] * len(lengths)
    return [1 / (len(lengths) * max_new_tokens)] * len(lengths)
