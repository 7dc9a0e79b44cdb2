"""Weights gathered layer by layer: in every pass each layer's are brought together just before it computes, where those of the layer before the last were.

A gather is for all ranks at once, and each has another number of passes to make. So a pass begins with a word to the others, and a rank that has none left to make
takes part in theirs, without computing, until none has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ebbtide.cluster.world import World
from ebbtide.errors import UserError
from ebbtide.memory.shards import Region, local, region
from ebbtide.policy.model import decoder

ALIGNED = 512  # bytes, as torch aligns what it allocates: by less a library might choose another kernel, and so other bits, than for weights gathered whole

# Later ones than torch 2.11 have it under another name, and warn of the old one.
_all_gather: Callable[..., object] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

Pair = tuple[nn.Parameter, DTensor]
"""A weight as it is generated with, and as ranks share it out."""


@dataclass
class _Layer:
    """Views of the memory that all layers use in turn."""

    weights: list[DTensor]
    """Of which something is here."""
    sent: Tensor  # bytes
    packed: list[Tensor]
    """In `sent`: what is here of each of these weights."""
    received: Tensor  # bytes: what each rank sent, end to end
    pieces: list[Tensor]
    """In `received`: each part once, whichever rank has it."""
    places: list[Tensor]
    """Of the whole weights: where each piece goes."""
    parts: list[Tensor] = field(default_factory=list)
    """What is here of `weights`, while they are there."""


class Layers:
    """Those of a model whose weights are in memory for two layers at once: the one that computes, and the next one, gathered behind it."""

    def __init__(self, model: PreTrainedModel, pairs: Sequence[Pair], world: World, mesh: DeviceMesh, timeout: timedelta) -> None:
        """Takes charge of those of the pairs that belong to one layer; `rest` are the others."""
        blocks = getattr(decoder(model), "layers", None)
        if not isinstance(blocks, nn.ModuleList):
            raise UserError(
                f"`cluster.generate: layers`: {type(model).__name__} has no list of layers to gather one by one: set it to `whole`"
            )
        named = [list(block.parameters()) for block in blocks]
        uses = Counter(id(weight) for _, weight in model.named_parameters(remove_duplicate=False))
        owner = {id(weight): number for number, weights in enumerate(named) for weight in weights if uses[id(weight)] == 1}
        self.rest = [pair for pair in pairs if id(pair[0]) not in owner]
        groups: list[list[Pair]] = [[] for _ in named]
        for pair in pairs:
            if id(pair[0]) in owner:
                groups[owner[id(pair[0])]].append(pair)
        self._world, self._device = world, model.device
        # The ranks that have one copy of the weights between them.
        ranks = mesh.mesh[mesh.get_local_rank(0)].flatten().tolist()
        self._group = dist.new_group(ranks, timeout=timeout, use_local_synchronization=True)
        everyone = world.gathered([[region(weight) for _, weight in group] for group in groups])
        self._lay_out(groups, [everyone[rank] for rank in ranks], ranks.index(world.rank))
        self._due = 0
        self._side = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        for number, block in enumerate(blocks):
            block.register_forward_pre_hook(partial(self._before, number))

    def _lay_out(self, groups: Sequence[Sequence[Pair]], regions: Sequence[Sequence[Sequence[Region]]], mine: int) -> None:
        """`regions`: of each rank, by layer and weight."""
        types = [[twin.dtype for twin, _ in group] for group in groups]
        sizes = [[twin.numel() * twin.element_size() for twin, _ in group] for group in groups]
        parts = [
            [[part.size.numel() * dtype.itemsize for part, dtype in zip(*some, strict=True)] for some in zip(rank, types, strict=True)]
            for rank in regions
        ]
        lengths = [max(_starts(rank[number])[-1] for rank in parts) for number in range(len(groups))]
        longest, largest = max(lengths), max(_starts(some)[-1] for some in sizes)
        # What this rank sends, what it receives, and the weights of two layers in turn.
        self._memory = [
            torch.empty(size, dtype=torch.uint8, device=self._device) for size in (longest, longest * len(regions), largest, largest)
        ]
        self._sizes = [buffer.numel() for buffer in self._memory]
        sent, received, *wholes = self._memory
        self._layers: list[_Layer] = []
        for number, (group, length) in enumerate(zip(groups, lengths, strict=True)):
            layer = _Layer([], sent[:length], [], received[: length * len(regions)], [], [])
            for (twin, _), start in zip(group, _starts(sizes[number]), strict=False):
                twin.data = _numbers(wholes[number % 2], start, twin.size(), twin.dtype)
            seen: set[tuple[int, tuple[int, ...]]] = set()
            for rank, theirs in enumerate(regions):
                starts = _starts(parts[rank][number])
                for place, ((twin, weight), part, start) in enumerate(zip(group, theirs[number], starts, strict=False)):
                    if not part.size.numel():
                        continue
                    if rank == mine:
                        layer.weights.append(weight)
                        layer.packed.append(_numbers(sent, start, part.size, twin.dtype))
                    if (place, part.offset) not in seen:  # tensor parallelism leaves some weights alike on several ranks
                        seen.add((place, part.offset))
                        layer.pieces.append(_numbers(received, rank * length + start, part.size, twin.dtype))
                        box = tuple(slice(first, first + size) for first, size in zip(part.offset, part.size, strict=True))
                        layer.places.append(twin.data[box])
            self._layers.append(layer)
        self._free()

    def _free(self) -> None:
        for buffer in self._memory:
            buffer.untyped_storage().resize_(0)

    @contextmanager
    def there(self) -> Iterator[None]:
        """Passes through the model can be made meanwhile. All ranks come here together."""
        for buffer, size in zip(self._memory, self._sizes, strict=True):
            buffer.untyped_storage().resize_(size)
        for layer in self._layers:
            layer.parts = [local(weight) for weight in layer.weights]
        self._due = 0
        try:
            yield
        finally:
            self._wait()  # the memory goes back to where compute takes it from
            self._free()

    def until_all_are_done(self) -> None:
        """Takes part in the others' passes, for as long as there are any."""
        while self._world.any(False):
            for layer in self._layers:
                self._gather(layer, used=False)

    def _before(self, number: int, *_: object) -> None:
        """A layer is about to compute: its weights are there, and the next one's are under way."""
        if number != self._due:
            raise RuntimeError(
                f"layer {number} was called, and it was layer {self._due}'s turn: `cluster.generate: layers` needs all in order"
            )
        if number == 0:
            self._world.any(True)  # a pass begins, and the others take part in it
            self._gather(self._layers[0])
        self._wait()
        self._due = (number + 1) % len(self._layers)
        if self._due:
            self._gather(self._layers[self._due])

    @torch.no_grad()
    def _gather(self, layer: _Layer, *, used: bool = True) -> None:
        """On a GPU on a stream of its own, after what compute was given so far: the layer before the last, whose memory it takes, is done then."""
        if not layer.pieces:
            return
        if self._side is not None:
            self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side):
            if layer.parts:
                torch._foreach_copy_(layer.packed, layer.parts)
            _all_gather(layer.received, layer.sent, group=self._group)
            if used:
                torch._foreach_copy_(layer.places, layer.pieces)

    def _wait(self) -> None:
        """Compute does, for all that was gathered so far."""
        if self._side is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._side)


def _starts(sizes: Sequence[int]) -> list[int]:
    """Where pieces of these sizes in bytes begin, one after the other; and where the last one ends."""
    return list(accumulate((-(-size // ALIGNED) * ALIGNED for size in sizes), initial=0))


def _numbers(memory: Tensor, start: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """A stretch of memory as a tensor."""
    return memory[start : start + shape.numel() * dtype.itemsize].view(dtype).view(shape)
