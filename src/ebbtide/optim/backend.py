"""The interface of the optimizer's backends, and what they share: the parameters, and their state in chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ebbtide.config.optimizer import OptimizerConfig
from ebbtide.memory.mover import Move
from ebbtide.optim import rule as plain
from ebbtide.optim.layout import Chunk, Segment, pack_chunks
from ebbtide.optim.rule import AdamWState, Rule, StepArgs
from ebbtide.parallel.dtensor import Region, is_sharded, local, local_region
from ebbtide.system.torch_internals import foreach_norm


@dataclass
class TrainedParameter:
    """A parameter that is trained. Its step count stays on the host."""

    name: str
    weight: nn.Parameter
    decay: float
    steps: int = 0

    @cached_property
    def region(self) -> Region:
        """This rank's shard of it, which is stepped here."""
        return local_region(self.weight)

    @cached_property
    def flat_offset(self) -> int:
        """The position of the shard's first element in the flattened parameter."""
        return self.region.flat_offset

    @property
    def numel(self) -> int:
        """The number of elements on this rank; it may be 0."""
        return self.region.size.numel()

    @cached_property
    def flat(self) -> Tensor:
        """The shard, flat; training writes to it in place for as long as the run lasts."""
        return local(self.weight).view(-1)

    @property
    def grad(self) -> Tensor | None:
        """The shard's gradient, contiguous. A step reads hundreds of these: no view is created where none is needed."""
        grad = self.weight.grad
        if grad is None:
            return None
        return (local(grad) if is_sharded(grad) else grad).contiguous()


class OptimizerBackend(Protocol):
    """A backend: it steps some of the parameters, where their state lives."""

    def norms(self) -> list[tuple[int, float]]:
        """(parameter, norm of its gradient) for each parameter with a gradient, over the segments of this backend."""

    def step(self, rules: Mapping[int, Rule], since: Move) -> None:
        """Steps the parameters (by number) that have a rule; nothing has used their weights since `since`. On a GPU
        the step may only be queued when this returns."""

    def slices(self) -> Iterator[tuple[Segment, Tensor, AdamWState]]:
        """All of its state where it is: for each segment its weights (or their fp32 masters, where it keeps those) and
        the state of the whole chunk, which may be offloaded."""

    def restore(self, found: Mapping[int, FullState]) -> None:
        """Sets the state and the weights of some parameters (by number)."""


Kind = Literal["master", "first", "second"]


class FullState(NamedTuple):
    """The state of some elements as every backend understands it, on the host."""

    master: Tensor  # fp32
    first: Tensor
    second: Tensor

    def part(self, segment: Segment) -> FullState:
        """A segment's part of a whole parameter's state."""
        return FullState(*(tensor[segment.start : segment.stop] for tensor in self))


def read_full_state(kind: Kind, weight: Tensor, state: AdamWState) -> Tensor:
    """Computes one field of `FullState` from a weight and its state, on the device that they are on."""
    if kind == "master":
        return weight if state.low is None else plain.join_master(weight, state.low, state.second)
    if kind == "second" and state.low is not None:
        return state.second.abs()
    return state.first if kind == "first" else state.second


def write_full_state(full: FullState, weight: Tensor, state: AdamWState) -> None:
    """Writes the full state into a weight and its state, on the device that they are on."""
    master, first, second = (tensor.to(weight.device) for tensor in full)
    state.first.copy_(first)
    if state.low is None:
        weight.copy_(master)
    else:
        second = plain.split_master(master, weight, state.low, second)
    state.second.copy_(second)


def moment_dtype(config: OptimizerConfig) -> torch.dtype:
    return torch.float32 if config.state_dtype == "float32" else torch.bfloat16


def cut_chunks(
    trained: Sequence[TrainedParameter], segments: Sequence[Segment], limit: int
) -> list[tuple[Chunk, torch.dtype]]:
    """Cuts segments into chunks, each with weights of one dtype: (chunk, dtype)."""
    dtypes = dict.fromkeys(trained[segment.parameter].weight.dtype for segment in segments)
    return [
        (chunk, dtype)
        for dtype in dtypes
        for chunk in pack_chunks(
            [segment for segment in segments if trained[segment.parameter].weight.dtype == dtype], limit
        )
    ]


def view_state(low: Tensor | None, moments: Tensor, size: int, dtype: torch.dtype) -> AdamWState:
    """Views flat bytes as the state of `size` elements: first moments, then second moments."""
    first, second = moments[: 2 * size * dtype.itemsize].view(dtype).view(2, size)
    return AdamWState(None if low is None else low[: 2 * size].view(torch.int16), first, second)


def device_norms(trained: Sequence[TrainedParameter], segments: Sequence[Segment]) -> list[tuple[int, float]]:
    """The norms of gradients on the device, in fp32 whatever their dtype, with one transfer for all of them."""
    numbers, grads = [], []
    for segment in segments:
        grad = trained[segment.parameter].grad
        if grad is not None:
            numbers.append(segment.parameter)
            grads.append(grad if segment.size == grad.numel() else grad.view(-1)[segment.start : segment.stop])
    if not grads:
        return []
    norms = torch.stack(foreach_norm(grads)).tolist()
    return list(zip(numbers, norms, strict=True))


def build_chunk_steps(
    trained: Sequence[TrainedParameter], chunks: Sequence[Chunk], rules: Mapping[int, Rule]
) -> list[Callable[[AdamWState], None]]:
    """Builds the functions that step each chunk in place, once its state is on the weights' device.

    All are built before the first is called: on a GPU each reads a table there, whose transfer must not wait behind
    chunks that move.
    """
    grads = {number: trained[number].grad for number in rules}  # read once: a gradient that is not contiguous is copied
    work = [
        [
            StepArgs(
                segment,
                trained[segment.parameter].flat,
                grad,
                trained[segment.parameter].flat_offset,
                rules[segment.parameter],
            )
            for segment in chunk.segments
            if (grad := grads.get(segment.parameter)) is not None
        ]
        for chunk in chunks
    ]
    if any(stretch.weight.is_cuda for stretches in work for stretch in stretches):
        from ebbtide.optim import gpu_kernels  # needs triton, which torch brings along on a GPU

        return gpu_kernels.build_chunk_steps(work)
    return [partial(_step, stretches) for stretches in work]


def _step(stretches: Sequence[StepArgs], state: AdamWState) -> None:
    for segment, weight, grad, first, rule in stretches:
        part, place = state.part(segment.offset, segment.offset + segment.size), slice(segment.start, segment.stop)
        plain.update(weight[place], grad.view(-1)[place], part, rule, first + segment.start)
