"""Weights gathered layer by layer: in every pass, each layer's weights are all-gathered just before it computes, into
the memory of the layer before the last.

An all-gather needs all ranks, and ranks make different numbers of passes. So a rank announces each pass to the others,
and a rank with no passes left takes part in theirs, without computing, until no rank has any.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
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

from ebbtide.errors import UserError
from ebbtide.memory.gauge import transient
from ebbtide.model.load import layers_of
from ebbtide.parallel.comm import Comm
from ebbtide.parallel.costs import GATHERED
from ebbtide.parallel.dtensor import Region, local, local_region
from ebbtide.parallel.group import all_gather_single
from ebbtide.system.torch_internals import foreach_copy
from ebbtide.system.units import ceil_div

# Bytes, as torch aligns its allocations: at a smaller alignment a library might choose another kernel than for weights
# gathered all at once, and so compute other bits.
ALIGNED = 512

WeightPair = tuple[nn.Parameter, DTensor]
"""A full weight, which generates, and the sharded one, which trains."""


@dataclass
class _Layer:
    """One layer's views of the buffers that all layers use in turn."""

    weights: list[DTensor]
    """The sharded weights of which this rank has a part."""
    sent: Tensor  # bytes
    packed: list[Tensor]
    """Views of `sent`: this rank's part of each of these weights."""
    received: Tensor  # bytes: what each rank sent, one after the other
    pieces: list[Tensor]
    """Views of `received`: each part once, even if several ranks sent it."""
    places: list[Tensor]
    """Views of the full weights: where each piece is copied to."""
    parts: list[Tensor] = field(default_factory=list)
    """This rank's parts of `weights`, while they are materialized."""


class LayerwiseGather:
    """Gathers a model's layers one by one. Two layers are in memory at once: the one that computes, and the next one,
    which is gathered meanwhile."""

    def __init__(
        self, model: PreTrainedModel, pairs: Sequence[WeightPair], comm: Comm, mesh: DeviceMesh, timeout: timedelta
    ) -> None:
        """Gathers those of the pairs that belong to exactly one layer; `rest` has the others."""
        blocks = layers_of(model)
        if blocks is None:
            raise UserError(
                f"`parallel.rollout_weights: layerwise`: {type(model).__name__} has no list of layers to gather one by"
                " one: set it to `gathered`"
            )
        named = [list(block.parameters()) for block in blocks]
        uses = Counter(id(weight) for _, weight in model.named_parameters(remove_duplicate=False))
        owner = {
            id(weight): number for number, weights in enumerate(named) for weight in weights if uses[id(weight)] == 1
        }
        self.outside_layers = [pair for pair in pairs if id(pair[0]) not in owner]
        groups: list[list[WeightPair]] = [[] for _ in named]
        for pair in pairs:
            if id(pair[0]) in owner:
                groups[owner[id(pair[0])]].append(pair)
        self._comm, self._device = comm, model.device
        # The ranks that share one copy of the weights.
        ranks = mesh.mesh[mesh.get_local_rank(0)].flatten().tolist()
        self._group = dist.new_group(ranks, timeout=timeout, use_local_synchronization=True)
        regions = comm.all_gather([[local_region(weight) for _, weight in group] for group in groups])
        self._lay_out_buffers(groups, [regions[rank] for rank in ranks], ranks.index(comm.rank))
        self._next_layer = 0
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        for number, block in enumerate(blocks):
            block.register_forward_pre_hook(partial(self._before_layer, number))

    def _lay_out_buffers(
        self, groups: Sequence[Sequence[WeightPair]], regions: Sequence[Sequence[Sequence[Region]]], mine: int
    ) -> None:
        """Lays all layers out in the buffers. `regions` has what each rank has of each weight, by rank, layer and
        weight; this rank is number `mine`."""
        types = [[full.dtype for full, _ in group] for group in groups]
        sizes = [[full.numel() * full.element_size() for full, _ in group] for group in groups]
        parts = [
            [
                [part.size.numel() * dtype.itemsize for part, dtype in zip(*some, strict=True)]
                for some in zip(rank, types, strict=True)
            ]
            for rank in regions
        ]
        lengths = [max(_starts(rank[number])[-1] for rank in parts) for number in range(len(groups))]
        longest, largest = max(lengths), max(_starts(some)[-1] for some in sizes)
        # The buffers: what this rank sends, what it receives, and the full weights of two layers in turn.
        self._memory = [
            torch.empty(size, dtype=torch.uint8, device=self._device)
            for size in (longest, longest * len(regions), largest, largest)
        ]
        self._sizes = [buffer.numel() for buffer in self._memory]
        sent, received, *fulls = self._memory
        self._layers: list[_Layer] = []
        for number, (group, length) in enumerate(zip(groups, lengths, strict=True)):
            layer = _Layer([], sent[:length], [], received[: length * len(regions)], [], [])
            for (full, _), start in zip(group, _starts(sizes[number]), strict=False):
                full.data = _view(fulls[number % 2], start, full.size(), full.dtype)
            seen: set[tuple[int, tuple[int, ...]]] = set()
            for rank, theirs in enumerate(regions):
                starts = _starts(parts[rank][number])
                for place, ((full, weight), part, start) in enumerate(zip(group, theirs[number], starts, strict=False)):
                    if not part.size.numel():
                        continue
                    if rank == mine:
                        layer.weights.append(weight)
                        layer.packed.append(_view(sent, start, part.size, full.dtype))
                    # With tensor parallelism, several ranks have the same part of some weights.
                    if (place, part.offset) not in seen:
                        seen.add((place, part.offset))
                        layer.pieces.append(_view(received, rank * length + start, part.size, full.dtype))
                        box = tuple(
                            slice(first, first + size) for first, size in zip(part.offset, part.size, strict=True)
                        )
                        layer.places.append(full.data[box])
            self._layers.append(layer)
        self._free()

    def _free(self) -> None:
        for buffer in self._memory:
            buffer.untyped_storage().resize_(0)

    @contextmanager
    def materialized(self) -> Iterator[None]:
        """Allocates the buffers: within this context, the model can compute. All ranks must call this together."""
        with transient(GATHERED.name, sum(self._sizes)):
            for buffer, size in zip(self._memory, self._sizes, strict=True):
                buffer.untyped_storage().resize_(size)
            for layer in self._layers:
                layer.parts = [local(weight) for weight in layer.weights]
            self._next_layer = 0
            try:
                yield
            finally:
                self._wait()  # the compute stream may reuse the freed memory
                self._free()

    def join_remaining_passes(self) -> None:
        """Takes part in the all-gathers of other ranks' passes, until no rank has any left."""
        while self._comm.any(False):
            for layer in self._layers:
                self._gather(layer, used=False)

    def _before_layer(self, number: int, *_: object) -> None:
        """Runs before a layer computes: waits for its weights, and starts to gather the next layer's."""
        if number != self._next_layer:
            raise RuntimeError(
                f"layer {number} was called where layer {self._next_layer} was next: `parallel.rollout_weights:"
                " layerwise` needs a model that calls its layers in order"
            )
        if number == 0:
            self._comm.any(True)  # announces a pass, so that the other ranks take part in its all-gathers
            self._gather(self._layers[0])
        self._wait()
        self._next_layer = (number + 1) % len(self._layers)
        if self._next_layer:
            self._gather(self._layers[self._next_layer])

    @torch.no_grad()
    def _gather(self, layer: _Layer, *, used: bool = True) -> None:
        """All-gathers a layer, on a GPU on a stream of its own. It runs after the kernels launched so far: the layer
        before the last, whose memory it reuses, has computed then."""
        if not layer.pieces:
            return
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            if layer.parts:
                foreach_copy(layer.packed, layer.parts)
            all_gather_single(layer.received, layer.sent, group=self._group)
            if used:
                foreach_copy(layer.places, layer.pieces)

    def _wait(self) -> None:
        """Makes the compute stream wait for all gathers so far."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)


def _starts(sizes: Sequence[int]) -> list[int]:
    """Returns the aligned offsets of consecutive pieces of these sizes in bytes, and the end of the last one."""
    return list(accumulate((ceil_div(size, ALIGNED) * ALIGNED for size in sizes), initial=0))


def _view(memory: Tensor, start: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Returns a view of bytes as a tensor."""
    return memory[start : start + shape.numel() * dtype.itemsize].view(dtype).view(shape)
