"""The device memory of the output head: logits in chunks, and the gradient of its weight. This file imports no
torch."""

from __future__ import annotations

from ebbtide.memory.plan import HoldingSpec
from ebbtide.model.linear_sizes import last_columns

LOGITS = HoldingSpec("logits", transient=True)
"""The logits of a chunk, and in a backward the gradient of the head's weight."""


def forward_bytes(predicted: float, vocabulary: int, chunk: int, itemsize: int) -> float:
    """The bytes of logits in a forward over `predicted` tokens: while a chunk is computed, the one before it is still
    there."""
    return itemsize * min(chunk, predicted) * vocabulary * ((2 if predicted > chunk else 1) + _copies(vocabulary))


def backward_bytes(predicted: float, vocabulary: int, embedding: int, chunk: int, itemsize: int) -> float:
    """The bytes of the head's backward: the gradient of its weight in fp32, the logits of a chunk, and those of another
    chunk or, at the end, the gradient rounded to `itemsize` bytes."""
    logits = itemsize * min(chunk, predicted) * vocabulary
    beside = max(logits if predicted > chunk else 0, itemsize * embedding)
    return 4 * embedding + logits * (1 + _copies(vocabulary)) + beside


def _copies(vocabulary: int) -> int:
    """How often logits are copied while they are computed."""
    return 1 if last_columns(vocabulary) else 0
