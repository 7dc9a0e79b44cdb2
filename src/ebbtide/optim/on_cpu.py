"""State and arithmetic both on the host. Gradients leave the device while the backward makes them, a batch at a time, and add up here; each chunk's new weights go up
while the next ones are stepped.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from ebbtide.config.tree import Optimizer as OptimizerConfig
from ebbtide.memory.host import usable_cores
from ebbtide.memory.mover import Move
from ebbtide.memory.residency import Residency
from ebbtide.optim.layout import Chunk, Segment
from ebbtide.optim.native import Added, Stepped, arithmetic
from ebbtide.optim.part import Exact, Trained, chunked, moment_type
from ebbtide.optim.rule import Rule, State
from ebbtide.optim.sizes import CPU_CHUNK as CHUNK
from ebbtide.optim.sizes import CPU_SLOTS as SLOTS
from ebbtide.optim.sums import Sums, as_bytes


@dataclass(frozen=True)
class _HostChunk:
    chunk: Chunk
    master: Tensor
    first: Tensor
    second: Tensor
    grads: Tensor
    dtype: torch.dtype  # of the weights


@dataclass
class _Staging:
    """Pinned bytes on the way to the device."""

    data: Tensor
    used_by: Move | None = None


class OnCpu:
    def __init__(self, trained: Sequence[Trained], segments: Sequence[Segment], config: OptimizerConfig, residency: Residency) -> None:
        self._trained, self._residency, self._mover, self._overlap = trained, residency, residency.mover, config.overlap
        # One core is for the thread that feeds the device.
        self._math = arithmetic(max(1, usable_cores() - (residency.device.type == "cuda")))
        # The arithmetic has threads of its own: one of these is in it, and the other ready to be.
        self._pool = ThreadPoolExecutor(2, "ebbtide-optimizer")
        self._chunks = self._host_chunks(chunked(trained, segments, CHUNK), config)
        self._home: dict[int, list[tuple[_HostChunk, Segment]]] = {}
        for held in self._chunks:
            for segment in held.chunk.segments:
                self._home.setdefault(segment.parameter, []).append((held, segment))
        widest = max(held.grads.nbytes for held in self._chunks)
        residency.arena.reserve([SLOTS * widest, *[widest] * SLOTS])
        self._sums = Sums(residency.arena.take(SLOTS * widest).data, widest, self._mover, self._math)
        self._up = [_Staging(residency.arena.take(widest).data) for _ in range(SLOTS)]
        self._read_weights()
        # A parameter that is cut has its gradient on the device until the step, for the other part's sake.
        whole = {segment.parameter for segment in segments if segment.size == trained[segment.parameter].count}
        for number in whole if config.overlap else ():
            trained[number].weight.register_post_accumulate_grad_hook(_Leaves(self, number))

    def about(self) -> str:
        """In a phrase: who steps what."""
        slow = (
            ""
            if self._math.compiled
            else "; a C compiler (`cc`, or $CC) is missing or fails, or what it makes cannot be loaded: torch's own kernels do it, slower"
        )
        return f"the CPU steps {sum(segment.size for held in self._chunks for segment in held.chunk.segments):,} parameters with {self._math.threads} threads{slow}"

    def _host_chunks(self, chunks: Sequence[tuple[Chunk, torch.dtype]], config: OptimizerConfig) -> list[_HostChunk]:
        kind = moment_type(config)
        grad_kinds = [torch.float32 if config.grad_dtype == "float32" else dtype for _, dtype in chunks]
        sizes = [chunk.size for chunk, _ in chunks]
        host = self._residency.host
        masters = host("master", [4 * size for size in sizes], pinned=False)
        moments = host("moments", [2 * size * kind.itemsize for size in sizes], pinned=False)
        grads = host("grads", [size * kind.itemsize for size, kind in zip(sizes, grad_kinds, strict=True)], pinned=True)
        return [
            _HostChunk(chunk, master.view(torch.float32), *_halves(moment.view(kind)), grad.view(grad_kind), dtype)
            for (chunk, dtype), master, moment, grad, grad_kind in zip(chunks, masters, moments, grads, grad_kinds, strict=True)
        ]

    def _read_weights(self) -> None:
        """The masters from the weights, by way of the gradients' memory."""
        for held in self._chunks:
            landed = held.grads.view(torch.uint8)[: held.chunk.size * held.dtype.itemsize].view(held.dtype)
            pairs = [(self._weight(segment), _stretch(landed, segment)) for segment in held.chunk.segments]
            self._mover.host_waits(self._mover.move_out([(as_bytes(weight), as_bytes(host)) for weight, host in pairs], after=None))
            self._math.add([Added(held.master, landed, first=True)])()
        self._mover.take()  # not a part of any phase

    def _weight(self, segment: Segment) -> Tensor:
        return self._trained[segment.parameter].flat[segment.start : segment.stop]

    # Gradients come down

    def arrive(self, number: int) -> None:
        """In a backward: takes a parameter's gradient off the device, and adds it to what came before it in this accumulation."""
        if not self._sums.waiting:  # none is to wait, and take room, until the next backward
            torch.autograd.Variable._execution_engine.queue_callback(self._sums.send)
        self._take(number)
        self._trained[number].weight.grad = None

    def _take(self, number: int) -> None:
        whole = self._trained[number].grad
        assert whole is not None
        grad = whole.view(-1)
        for held, segment in self._home[number]:
            self._sums.take(segment, grad[segment.start : segment.stop], _stretch(held.grads, segment))
            if not self._overlap:
                self._sums.squares()

    def norms(self) -> list[tuple[int, float]]:
        for number in self._home:
            if self._trained[number].weight.grad is not None:
                self._take(number)
        totals: dict[int, float] = {}
        for segment, squares in self._sums.squares().items():
            totals[segment.parameter] = totals.get(segment.parameter, 0.0) + squares
        return [(number, math.sqrt(total)) for number, total in sorted(totals.items())]

    # Weights go up

    def step(self, rules: Mapping[int, Rule], since: Move) -> None:
        stepped: deque[tuple[_HostChunk, _Staging, Future[None]]] = deque()
        work = [held for held in self._chunks if any(segment.parameter in rules for segment in held.chunk.segments)]
        for number, held in enumerate(work):
            staging = self._up[number % SLOTS]
            self._mover.host_waits(staging.used_by)
            stepped.append((held, staging, self._pool.submit(self._math.step(self._stretches(held, staging, rules)))))
            if len(stepped) == SLOTS - 1 or not self._overlap:
                self._send_up(*stepped.popleft(), rules, since)
        while stepped:
            self._send_up(*stepped.popleft(), rules, since)
        if work:
            last = self._up[(len(work) - 1) % SLOTS].used_by
            assert last is not None
            self._mover.compute_waits(last)

    def _stretches(self, held: _HostChunk, staging: _Staging, rules: Mapping[int, Rule]) -> list[Stepped]:
        """Of a chunk; the new weights come into the staging memory."""
        weights, found = _weights_in(staging, held), []
        for segment in held.chunk.segments:
            if (rule := rules.get(segment.parameter)) is not None:
                s, first = slice(segment.offset, segment.offset + segment.size), self._trained[segment.parameter].first
                flat = held.master[s], held.grads[s], held.first[s], held.second[s], weights[s]
                found.append(Stepped(*flat, rule, first + segment.start))
        return found

    def _send_up(self, held: _HostChunk, staging: _Staging, task: Future[None], rules: Mapping[int, Rule], since: Move) -> None:
        task.result()
        weights = _weights_in(staging, held)
        pairs = [(self._weight(segment), _stretch(weights, segment)) for segment in held.chunk.segments if segment.parameter in rules]
        # Beside whatever the GPU steps and fetches meanwhile.
        staging.used_by = self._mover.move_in_aside([(as_bytes(weight), as_bytes(new)) for weight, new in pairs], since)
        if not self._overlap:
            self._mover.host_waits(staging.used_by)

    def stretches(self) -> Iterator[tuple[Segment, Tensor, State]]:
        for held in self._chunks:
            for segment in held.chunk.segments:
                yield segment, _stretch(held.master, segment), State(None, held.first, held.second)

    def restore(self, found: Mapping[int, Exact]) -> None:
        for held in self._chunks:
            for segment in held.chunk.segments:
                if (whole := found.get(segment.parameter)) is not None:
                    exact = whole.part(segment)
                    for flat, tensor in zip((held.master, held.first, held.second), exact, strict=True):
                        _stretch(flat, segment).copy_(tensor)
                    self._weight(segment).copy_(exact.master)

    def clear(self) -> None:
        """Forgets the gradients that came down."""
        self._sums.clear()


class _Leaves:
    """A hook of a parameter that does not keep the optimizer alive."""

    def __init__(self, owner: OnCpu, number: int) -> None:
        self._owner, self._number = weakref.ref(owner), number

    def __call__(self, _: Tensor) -> None:
        owner = self._owner()
        if owner is not None:
            owner.arrive(self._number)


def _halves(flat: Tensor) -> tuple[Tensor, Tensor]:
    return flat[: len(flat) // 2], flat[len(flat) // 2 :]


def _stretch(flat: Tensor, segment: Segment) -> Tensor:
    """A segment's part of its chunk."""
    return flat[segment.offset : segment.offset + segment.size]


def _weights_in(staging: _Staging, held: _HostChunk) -> Tensor:
    return staging.data[: held.chunk.size * held.dtype.itemsize].view(held.dtype)
