"""Weights that are multiplied with the same input, as one matrix: queries, keys and values; the two halves of a gated
MLP.

Each stays the model's own parameter, under its own name: a view of one storage in which they follow each other. What
reads or writes a parameter is not concerned. Where parameters do not follow each other (FSDP gathers each into memory
of its own, and a reference has other weights), they are copied side by side for the call, which takes a fraction of
a percent longer and needs the memory of these weights of one block once more; or, with few rows, multiplied one by one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ebbtide.model.linear import linear
from ebbtide.system.torch_internals import storage_id
from ebbtide.system.units import ceil_div

ALIGNED = 16  # bytes: kernels load from multiples of it


@torch.no_grad()
def join(parameters: Sequence[Tensor]) -> None:
    """Moves parameters, which are alike but for their rows, into one new storage, one after the other."""
    whole = torch.cat([parameter.detach() for parameter in parameters])
    for parameter, part in zip(parameters, whole.split([len(one) for one in parameters]), strict=True):
        parameter.data = part


@torch.no_grad()
def pack(parameters: Sequence[Tensor]) -> None:
    """Moves parameters of any kinds into one new storage, which moves as a whole. Those that follow each other in
    memory still do. The largest come first, so that the addresses of all are as round as their sizes."""
    runs: list[list[Tensor]] = []
    for one in sorted(parameters, key=lambda one: (storage_id(one), one.data_ptr())):
        last = runs[-1][-1] if runs else None
        if last is not None and storage_id(last) == storage_id(one) and last.data_ptr() + last.nbytes == one.data_ptr():
            runs[-1].append(one)
        else:
            runs.append([one])
    runs.sort(key=lambda run: -sum(one.nbytes for one in run))
    sizes = [ALIGNED * ceil_div(sum(one.nbytes for one in run), ALIGNED) for run in runs]
    whole = torch.empty(sum(sizes), dtype=torch.uint8, device=parameters[0].device)
    for run, part in zip(runs, whole.split(sizes), strict=True):
        start = 0
        for one in run:
            place = part[start : start + one.nbytes].view(one.dtype).view(one.shape)
            start += one.nbytes
            one.data = place.copy_(one)


def joined(parts: Sequence[Tensor]) -> Tensor | None:
    """The tensor of all parts, one after the other, if they are so in memory."""
    first, storage, end = parts[0], storage_id(parts[0]), parts[0].storage_offset()
    for part in parts:
        if storage_id(part) != storage or part.storage_offset() != end or not part.is_contiguous():
            return None
        end += part.numel()
    rows = sum(part.shape[0] for part in parts)
    return first.detach().as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())


class JoinedWeights:
    """The names of weights that are multiplied with the same input, or are the biases of such weights."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self.apart = False
        """Whether matrices are multiplied one by one with few rows, wherever they lie."""
        self._places: list[int] = []
        self._whole: Tensor | None = None

    def __call__(self, weights: dict[str, Tensor]) -> Tensor:
        """The weights of a call, as one."""
        whole = self._adjacent(weights)
        return torch.cat([weights[name].detach() for name in self.names]) if whole is None else whole

    def product(self, x: Tensor, weights: dict[str, Tensor], biases: JoinedWeights | None = None) -> Tensor:
        """The products of x [T, K] with all weights, side by side, with biases if there are any."""
        given = biases if biases is not None and biases.names else None
        if self.is_whole(weights) or x.shape[0] >= x.shape[1]:
            return linear(x, self(weights), None if given is None else given(weights))
        # With few rows, such as in decoding, to copy the weights would take longer than the products.
        names = [None] * len(self.names) if given is None else given.names
        pairs = zip(self.names, names, strict=True)
        return torch.cat([linear(x, weights[name], weights[bias] if bias else None) for name, bias in pairs], 1)

    def is_whole(self, weights: dict[str, Tensor]) -> bool:
        """Whether they are multiplied as one, however few the rows are."""
        return len(self.names) == 1 or (not self.apart and self._adjacent(weights) is not None)

    def _adjacent(self, weights: dict[str, Tensor]) -> Tensor | None:
        """The weights of a call, as one, if they follow each other in memory."""
        parts = [weights[name] for name in self.names]
        if len(parts) == 1:
            return parts[0].detach()
        places = [part.data_ptr() for part in parts]
        # The same addresses hold the same numbers, unless the memory was given back: then the whole, which has none of
        # its own, is elsewhere.
        if self._whole is None or places != self._places or self._whole.data_ptr() != places[0]:
            self._places, self._whole = places, joined(parts)
        return self._whole

    def split(self, whole: Tensor, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Name -> its part of a tensor like the whole, such as its gradient."""
        return dict(zip(self.names, whole.split([weights[name].shape[0] for name in self.names]), strict=True))
