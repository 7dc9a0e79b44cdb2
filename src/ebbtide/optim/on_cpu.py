"""The CPU backend of the optimizer: state and arithmetic are both on the host. Gradients are offloaded in batches while
the backward computes them, and accumulated here; each chunk's new weights are copied to the device while the next chunk
is stepped.
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

from ebbtide.config.optimizer import OptimizerConfig
from ebbtide.memory.host import usable_cores
from ebbtide.memory.mover import Move
from ebbtide.memory.residency import Residency
from ebbtide.optim.backend import FullState, TrainedParameter, cut_chunks, moment_dtype
from ebbtide.optim.costs import CPU_CHUNK as CHUNK
from ebbtide.optim.costs import CPU_SLOTS as SLOTS
from ebbtide.optim.costs import STAGING
from ebbtide.optim.cpu_kernels import CpuAddArgs, CpuStepArgs, cpu_math
from ebbtide.optim.grad_accumulator import HostGradAccumulator, as_bytes
from ebbtide.optim.layout import Chunk, Segment
from ebbtide.optim.rule import AdamWState, Rule
from ebbtide.system.torch_internals import call_after_backward


@dataclass(frozen=True)
class _HostChunk:
    """A chunk's state and summed gradients, all in host memory."""

    chunk: Chunk
    master: Tensor
    first: Tensor
    second: Tensor
    grads: Tensor
    dtype: torch.dtype
    """The dtype of the weights."""


@dataclass
class _Staging:
    """Pinned bytes on their way to the device."""

    data: Tensor
    used_by: Move | None = None


class CpuBackend:
    def __init__(
        self,
        trained: Sequence[TrainedParameter],
        segments: Sequence[Segment],
        config: OptimizerConfig,
        residency: Residency,
    ) -> None:
        self._trained, self._residency, self._mover, self._overlap = trained, residency, residency.mover, config.overlap
        # One core is left for the thread that launches the device's kernels.
        self._math = cpu_math(max(1, usable_cores() - (residency.device.type == "cuda")))
        # The arithmetic has threads of its own: one thread of this pool waits for it, the other is ready to call it.
        self._pool = ThreadPoolExecutor(2, "ebbtide-optimizer")
        self._chunks = self._host_chunks(cut_chunks(trained, segments, CHUNK), config)
        self._chunks_of: dict[int, list[tuple[_HostChunk, Segment]]] = {}
        for host_chunk in self._chunks:
            for segment in host_chunk.chunk.segments:
                self._chunks_of.setdefault(segment.parameter, []).append((host_chunk, segment))
        widest = max(host_chunk.grads.nbytes for host_chunk in self._chunks)
        landing, *up = residency.allocate_host(STAGING, [SLOTS * widest, *[widest] * SLOTS], pinned=True)
        self._accumulator = HostGradAccumulator(landing, widest, self._mover, self._math)
        self._up = [_Staging(data) for data in up]
        self._read_weights()
        # A parameter that is cut keeps its gradient on the device until the step, as the GPU steps the other part.
        whole = {segment.parameter for segment in segments if segment.size == trained[segment.parameter].numel}
        for number in whole if config.overlap else ():
            trained[number].weight.register_post_accumulate_grad_hook(_GradHook(self, number))

    def describe(self) -> str:
        """A note for the user: how much the CPU steps, and how."""
        count = sum(segment.size for host_chunk in self._chunks for segment in host_chunk.chunk.segments)
        slow = (
            "; it uses torch's kernels, which are slower,"
            " because no C compiler (`cc`, or $CC) works here or the library that it builds cannot be loaded"
        )
        return (
            f"the CPU steps {count:,} parameters with {self._math.threads} threads{'' if self._math.compiled else slow}"
        )

    def _host_chunks(self, chunks: Sequence[tuple[Chunk, torch.dtype]], config: OptimizerConfig) -> list[_HostChunk]:
        kind = moment_dtype(config)
        grad_kinds = [torch.float32 if config.grad_dtype == "float32" else dtype for _, dtype in chunks]
        sizes = [chunk.size for chunk, _ in chunks]
        host = self._residency.allocate_host
        masters = host("master", [4 * size for size in sizes], pinned=False)
        moments = host("moments", [2 * size * kind.itemsize for size in sizes], pinned=False)
        grads = host("grads", [size * kind.itemsize for size, kind in zip(sizes, grad_kinds, strict=True)], pinned=True)
        return [
            _HostChunk(chunk, master.view(torch.float32), *_halves(moment.view(kind)), grad.view(grad_kind), dtype)
            for (chunk, dtype), master, moment, grad, grad_kind in zip(
                chunks, masters, moments, grads, grad_kinds, strict=True
            )
        ]

    def _read_weights(self) -> None:
        """Sets the masters from the weights, by way of the gradients' memory."""
        for host_chunk in self._chunks:
            landed = host_chunk.grads.view(torch.uint8)[: host_chunk.chunk.size * host_chunk.dtype.itemsize].view(
                host_chunk.dtype
            )
            pairs = [(self._weight(segment), _slice(landed, segment)) for segment in host_chunk.chunk.segments]
            self._mover.host_waits(
                self._mover.move_out([(as_bytes(weight), as_bytes(host)) for weight, host in pairs], after=None)
            )
            self._math.add([CpuAddArgs(host_chunk.master, landed, first=True)])()
        self._mover.drain()  # these moves belong to no phase

    def _weight(self, segment: Segment) -> Tensor:
        return self._trained[segment.parameter].flat[segment.start : segment.stop]

    # Gradients to the host

    def offload_grad(self, number: int) -> None:
        """Called in a backward: offloads a parameter's gradient, and adds it to those before it in this
        accumulation."""
        if not self._accumulator.waiting:  # no gradient may wait on the device until the next backward
            call_after_backward(self._accumulator.flush)
        self._add_grad(number)
        self._trained[number].weight.grad = None

    def _add_grad(self, number: int) -> None:
        whole = self._trained[number].grad
        assert whole is not None
        grad = whole.view(-1)
        for host_chunk, segment in self._chunks_of[number]:
            self._accumulator.add(segment, grad[segment.start : segment.stop], _slice(host_chunk.grads, segment))
            if not self._overlap:
                self._accumulator.wait_for_squares()

    def norms(self) -> list[tuple[int, float]]:
        for number in self._chunks_of:
            if self._trained[number].weight.grad is not None:
                self._add_grad(number)
        totals: dict[int, float] = {}
        for segment, squares in self._accumulator.wait_for_squares().items():
            totals[segment.parameter] = totals.get(segment.parameter, 0.0) + squares
        return [(number, math.sqrt(total)) for number, total in sorted(totals.items())]

    # Weights to the device

    def step(self, rules: Mapping[int, Rule], since: Move) -> None:
        stepped: deque[tuple[_HostChunk, _Staging, Future[None]]] = deque()
        work = [
            host_chunk
            for host_chunk in self._chunks
            if any(segment.parameter in rules for segment in host_chunk.chunk.segments)
        ]
        for number, host_chunk in enumerate(work):
            staging = self._up[number % SLOTS]
            self._mover.host_waits(staging.used_by)
            stepped.append(
                (host_chunk, staging, self._pool.submit(self._math.step(self._steps(host_chunk, staging, rules))))
            )
            if len(stepped) == SLOTS - 1 or not self._overlap:
                self._send_up(*stepped.popleft(), rules, since)
        while stepped:
            self._send_up(*stepped.popleft(), rules, since)
        if work:
            last = self._up[(len(work) - 1) % SLOTS].used_by
            assert last is not None
            self._mover.compute_waits(last)

    def _steps(self, host_chunk: _HostChunk, staging: _Staging, rules: Mapping[int, Rule]) -> list[CpuStepArgs]:
        """The segments of a chunk that are stepped; their new weights go into the staging memory."""
        weights, found = _weights_in(staging, host_chunk), []
        for segment in host_chunk.chunk.segments:
            if (rule := rules.get(segment.parameter)) is not None:
                s = slice(segment.offset, segment.offset + segment.size)
                first = self._trained[segment.parameter].flat_offset
                flat = host_chunk.master[s], host_chunk.grads[s], host_chunk.first[s], host_chunk.second[s], weights[s]
                found.append(CpuStepArgs(*flat, rule, first + segment.start))
        return found

    def _send_up(
        self, host_chunk: _HostChunk, staging: _Staging, task: Future[None], rules: Mapping[int, Rule], since: Move
    ) -> None:
        task.result()
        weights = _weights_in(staging, host_chunk)
        pairs = [
            (self._weight(segment), _slice(weights, segment))
            for segment in host_chunk.chunk.segments
            if segment.parameter in rules
        ]
        # These copies are not ordered with what the GPU backend steps and fetches meanwhile.
        staging.used_by = self._mover.move_in_unordered(
            [(as_bytes(weight), as_bytes(new)) for weight, new in pairs], since
        )
        if not self._overlap:
            self._mover.host_waits(staging.used_by)

    def slices(self) -> Iterator[tuple[Segment, Tensor, AdamWState]]:
        for host_chunk in self._chunks:
            for segment in host_chunk.chunk.segments:
                yield segment, _slice(host_chunk.master, segment), AdamWState(None, host_chunk.first, host_chunk.second)

    def restore(self, found: Mapping[int, FullState]) -> None:
        for host_chunk in self._chunks:
            for segment in host_chunk.chunk.segments:
                if (whole := found.get(segment.parameter)) is not None:
                    full = whole.part(segment)
                    for flat, tensor in zip(
                        (host_chunk.master, host_chunk.first, host_chunk.second), full, strict=True
                    ):
                        _slice(flat, segment).copy_(tensor)
                    self._weight(segment).copy_(full.master)

    def clear(self) -> None:
        """Forgets the gradients that are on the host."""
        self._accumulator.clear()


class _GradHook:
    """A hook of a parameter's gradient that does not keep the optimizer alive."""

    def __init__(self, owner: CpuBackend, number: int) -> None:
        self._owner, self._number = weakref.ref(owner), number

    def __call__(self, _: Tensor) -> None:
        owner = self._owner()
        if owner is not None:
            owner.offload_grad(self._number)


def _halves(flat: Tensor) -> tuple[Tensor, Tensor]:
    return flat[: len(flat) // 2], flat[len(flat) // 2 :]


def _slice(flat: Tensor, segment: Segment) -> Tensor:
    """A segment's part of its chunk."""
    return flat[segment.offset : segment.offset + segment.size]


def _weights_in(staging: _Staging, host_chunk: _HostChunk) -> Tensor:
    return staging.data[: host_chunk.chunk.size * host_chunk.dtype.itemsize].view(host_chunk.dtype)
