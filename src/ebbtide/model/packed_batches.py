"""Packed sequences as batches of similar lengths, padded at their ends, and back: for layers that would pass a state
from one packed sequence into the next. One kernel copies all tokens in each direction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

PADDED = 1.25
"""A batch has at most so many times the tokens of its sequences."""


@dataclass(frozen=True)
class PackedBatches:
    """Where the tokens of a pack lie in batches, whose rows follow each other."""

    sizes: Sequence[tuple[int, int]]
    """Of each batch: its sequences, and the tokens of the longest."""
    tokens: Tensor
    """[places]: the token at each place; that of padding is the last of its sequence."""
    places: Tensor
    """[T]: the place of each token."""

    @staticmethod
    def of(lengths: Sequence[int], device: torch.device) -> PackedBatches:
        """The batches of packed sequences of these lengths."""
        starts = torch.tensor([0, *lengths]).cumsum(0)[:-1].tolist()
        sizes, tokens, places = [], list[Tensor](), torch.empty(sum(lengths), dtype=torch.long)
        count = 0
        for members in similar_lengths(lengths):
            longest = lengths[members[0]]
            own, first = (torch.tensor([some[one] for one in members])[:, None] for some in (lengths, starts))
            tokens.append(first + torch.arange(longest).minimum(own - 1))
            at = count + torch.arange(len(members) * longest).view(len(members), longest)
            real = torch.arange(longest) < own
            places[tokens[-1][real]] = at[real]
            sizes.append((len(members), longest))
            count += len(members) * longest
        both = torch.cat([places, *(one.flatten() for one in tokens)])
        both = (both.pin_memory() if device.type == "cuda" else both).to(device, non_blocking=True)
        return PackedBatches(sizes, both[len(places) :], both[: len(places)])


class PutInRows(torch.autograd.Function):
    """The tokens [T, ...] at their places in batches. Nothing that follows padding is read, so that its gradients are
    zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return x.index_select(0, tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (places,) = ctx.saved_tensors
        return grads[0].index_select(0, places), None, None


class TakeFromRows(torch.autograd.Function):
    """The tokens [T, ...] of all places."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.count = len(rows)
        return rows.index_select(0, places)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (places,) = ctx.saved_tensors
        found = grads[0].new_zeros((ctx.count, *grads[0].shape[1:]))
        return found.index_copy_(0, places, grads[0]), None


def similar_lengths(lengths: Sequence[int]) -> list[list[int]]:
    """The indices of sequences in groups whose padding is a small part of them, the longest first."""
    groups: list[list[int]] = []
    tokens = 0
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        tokens += lengths[number]
        if not groups or (len(groups[-1]) + 1) * lengths[groups[-1][0]] > PADDED * tokens:
            groups.append([])
            tokens = lengths[number]
        groups[-1].append(number)
    return groups
