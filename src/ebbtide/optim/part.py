"""What the ways of stepping share: the parameters, their state in chunks, and the interface behind which each way stands."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ebbtide.config.tree import Optimizer as OptimizerConfig
from ebbtide.memory.mover import Move
from ebbtide.memory.shards import Region, local, region, shared_out
from ebbtide.optim import rule as plain
from ebbtide.optim.layout import Chunk, Segment, lay_out
from ebbtide.optim.rule import Rule, State, Stretch


@dataclass
class Trained:
    """A parameter that is trained. The number of its steps stays on the host."""

    name: str
    weight: nn.Parameter
    decay: float
    steps: int = 0

    @cached_property
    def region(self) -> Region:
        """The part of it that is on this rank, and is stepped here."""
        return region(self.weight)

    @cached_property
    def first(self) -> int:
        """The place of that part in the flattened whole."""
        return self.region.first

    @property
    def count(self) -> int:
        """Elements on this rank; none is possible."""
        return self.region.size.numel()

    @cached_property
    def flat(self) -> Tensor:
        """Of that part; training writes to it in place, for as long as the run lasts."""
        return local(self.weight).view(-1)

    @property
    def grad(self) -> Tensor | None:
        """Of that part, contiguous. A step asks for hundreds: this takes no view where it needs none."""
        grad = self.weight.grad
        if grad is None:
            return None
        return (local(grad) if shared_out(grad) else grad).contiguous()


class Part(Protocol):
    """A share of the parameters, and the way in which it is stepped."""

    def norms(self) -> list[tuple[int, float]]:
        """(parameter, norm of its gradient) for each that has one: of the stretch that is in this part."""

    def step(self, rules: Mapping[int, Rule], since: Move) -> None:
        """Steps the parameters (by number) that have a rule; nothing has used their weights since `since`. On a GPU it may only be queued when this returns."""

    def stretches(self) -> Iterator[tuple[Segment, Tensor, State]]:
        """All of its state where it is: for each segment its weights, or their fp32 masters where it keeps those, and the state of its whole chunk, which may be away."""

    def restore(self, found: Mapping[int, Exact]) -> None:
        """Sets the state and the weights of some parameters (by number)."""


Kind = Literal["master", "first", "second"]


class Exact(NamedTuple):
    """The state of a stretch as every mode understands it, on the host."""

    master: Tensor  # fp32
    first: Tensor
    second: Tensor

    def part(self, segment: Segment) -> Exact:
        """Of a whole parameter: a segment's."""
        return Exact(*(tensor[segment.start : segment.stop] for tensor in self))


def exact(kind: Kind, weight: Tensor, state: State) -> Tensor:
    """One of `Exact`, from a weight and its state, on the device that they are on."""
    if kind == "master":
        return weight if state.low is None else plain.join(weight, state.low, state.second)
    if kind == "second" and state.low is not None:
        return state.second.abs()
    return state.first if kind == "first" else state.second


def put(exact: Exact, weight: Tensor, state: State) -> None:
    """Into a weight and its state, on the device that they are on."""
    master, first, second = (tensor.to(weight.device) for tensor in exact)
    state.first.copy_(first)
    if state.low is None:
        weight.copy_(master)
    else:
        second = plain.divide(master, weight, state.low, second)
    state.second.copy_(second)


def moment_type(config: OptimizerConfig) -> torch.dtype:
    return torch.float32 if config.state_dtype == "float32" else torch.bfloat16


def chunked(trained: Sequence[Trained], segments: Sequence[Segment], limit: int) -> list[tuple[Chunk, torch.dtype]]:
    """Chunks of weights of one type each."""
    kinds = dict.fromkeys(trained[segment.parameter].weight.dtype for segment in segments)
    return [
        (chunk, kind)
        for kind in kinds
        for chunk in lay_out([segment for segment in segments if trained[segment.parameter].weight.dtype == kind], limit)
    ]


def carve(low: Tensor | None, moments: Tensor, size: int, kind: torch.dtype) -> State:
    """The state of `size` elements from flat bytes: first moments, then second ones."""
    first, second = moments[: 2 * size * kind.itemsize].view(kind).view(2, size)
    return State(None if low is None else low[: 2 * size].view(torch.int16), first, second)


def device_norms(trained: Sequence[Trained], segments: Sequence[Segment]) -> list[tuple[int, float]]:
    """Norms of gradients on the device, in fp32 whatever their type; one transfer for all of them."""
    numbers, grads = [], []
    for segment in segments:
        grad = trained[segment.parameter].grad
        if grad is not None:
            numbers.append(segment.parameter)
            grads.append(grad if segment.size == grad.numel() else grad.view(-1)[segment.start : segment.stop])
    return list(zip(numbers, torch.stack(torch._foreach_norm(grads, 2, torch.float32)).tolist(), strict=True)) if grads else []


def chunk_steps(trained: Sequence[Trained], chunks: Sequence[Chunk], rules: Mapping[int, Rule]) -> list[Callable[[State], None]]:
    """What steps each chunk in place, once its state is on the weights' device.

    Made for all of them before the first: on a GPU it takes a table there, which is not to wait behind chunks that move.
    """
    grads = {number: trained[number].grad for number in rules}  # each once: one that is not contiguous is a copy
    work = [
        [
            Stretch(segment, trained[segment.parameter].flat, grad, trained[segment.parameter].first, rules[segment.parameter])
            for segment in chunk.segments
            if (grad := grads.get(segment.parameter)) is not None
        ]
        for chunk in chunks
    ]
    if any(stretch.weight.is_cuda for stretches in work for stretch in stretches):
        from ebbtide.optim import kernels  # needs triton, which torch brings along on a GPU

        return kernels.chunk_steps(work)
    return [partial(_step, stretches) for stretches in work]


def _step(stretches: Sequence[Stretch], state: State) -> None:
    for segment, weight, grad, first, rule in stretches:
        part, place = state.part(segment.offset, segment.offset + segment.size), slice(segment.start, segment.stop)
        plain.update(weight[place], grad.view(-1)[place], part, rule, first + segment.start)
