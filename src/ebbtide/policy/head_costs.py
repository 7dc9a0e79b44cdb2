"""The device memory of the output head: logits in chunks, and the gradient of its weight. This file imports no
torch."""

from __future__ import annotations

from ebbtide.memory.plan import HoldingSpec

LOGITS = HoldingSpec("logits", transient=True)
"""The logits of a chunk, and in a backward the gradient of the head's weight."""


def forward_bytes(predicted: float, vocabulary: int, chunk: int, itemsize: int) -> float:
    """The bytes of logits in a forward over `predicted` tokens: while a chunk is computed, the one before it is still
    there."""
    return itemsize * min(chunk, predicted) * vocabulary * (2 if predicted > chunk else 1)


def backward_bytes(predicted: float, vocabulary: int, embedding: int, chunk: int, itemsize: int) -> float:
    """The bytes of the head's backward: the gradient of its weight in fp32, the logits of a chunk, and those of another
    chunk or, at the end, the gradient rounded to `itemsize` bytes."""
    logits = itemsize * min(chunk, predicted) * vocabulary
    return 4 * embedding + logits + max(logits if predicted > chunk else 0, itemsize * embedding)
