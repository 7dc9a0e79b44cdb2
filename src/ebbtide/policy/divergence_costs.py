"""What a divergence over the vocabulary costs (policy/divergence.py): the logits of two models in chunks, and the
frozen model's hidden states, which are stored from its forward to the update. This file imports no torch."""

from __future__ import annotations

from ebbtide.config.root import Config
from ebbtide.memory.plan import HoldingName, HoldingSpec
from ebbtide.model.shape import Shape
from ebbtide.model.workload import Workload

# How often the kernels of a chunk read the logits of both models.
FORWARD_READS, BACKWARD_READS = 2, 1


def forward_bytes(predicted: float, vocabulary: int, chunk: int, itemsizes: int) -> float:
    """The bytes of a forward over `predicted` tokens: a chunk's logits of both models, whose weights have so many bytes
    together. Plain torch, on a CPU, has one more tensor of that size."""
    return itemsizes * min(chunk, predicted) * vocabulary


def backward_bytes(
    predicted: float, vocabulary: int, embedding: int, chunk: int, itemsizes: int, itemsize: int
) -> float:
    """The bytes of a backward: the gradient of the head's weight in fp32, and the logits of a chunk, over which their
    gradient is written, or, at the end, the gradient rounded to `itemsize` bytes."""
    return 4 * embedding + max(forward_bytes(predicted, vocabulary, chunk, itemsizes), itemsize * embedding)


def read_bytes(predicted: float, vocabulary: int, itemsizes: int, *, backward: bool) -> float:
    """The bytes that the kernels of a forward, with or without its backward, read of logits."""
    return (FORWARD_READS + (BACKWARD_READS if backward else 0)) * itemsizes * predicted * vocabulary


def hidden_of(model: HoldingName) -> HoldingName:
    """The holding that is the hidden states of a frozen model, from which its head computes logits."""
    return f"{model}_hidden"


def hidden_holdings(config: Config) -> list[HoldingSpec]:
    """The hidden states of frozen models whose heads the loss computes with. They exist from the phase in which the
    model computes them to the end of the step, and never move: they are new in every step."""
    if not config.frozen_heads_in:
        return []
    found = []
    for name in config.frozen_models:
        first = next(at for at, phase in enumerate(config.cycle) if name in config.forward_passes.get(phase, ()))
        exists_in = frozenset({*config.cycle[first:], *config.frozen_heads_in})
        found.append(
            HoldingSpec(hidden_of(name), frozenset(config.frozen_heads_in), movable=False, exists_in=exists_in)
        )
    return found


def hidden_bytes(config: Config, work: Workload, shape: Shape, itemsize: int, ranks: int) -> int:
    """The bytes of a frozen model's hidden states on one of so many data-parallel ranks: of its share, or of all
    sequences where its updates train on others than it computed them of."""
    holders = 1 if config.train.mixes_shares else ranks
    packed = work.pack(config.train.microbatch_tokens, ranks=holders)
    return round(itemsize * shape.hidden * sum(count * part.completion_tokens for part, count in packed.parts))
