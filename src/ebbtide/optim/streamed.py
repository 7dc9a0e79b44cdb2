"""The streamed backend of the optimizer: its state is in pinned host memory, and is stepped on the device. Chunk k+1 is
fetched while k is stepped and k-1 is copied back, over both directions of the host link at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ebbtide.config.optimizer import OptimizerConfig
from ebbtide.memory.gauge import transient
from ebbtide.memory.mover import Move
from ebbtide.memory.residency import Residency
from ebbtide.optim.backend import (
    FullState,
    TrainedParameter,
    build_chunk_steps,
    cut_chunks,
    device_norms,
    moment_dtype,
    view_state,
    write_full_state,
)
from ebbtide.optim.costs import RING
from ebbtide.optim.costs import STREAMED_CHUNK as CHUNK
from ebbtide.optim.costs import STREAMED_SLOTS as SLOTS
from ebbtide.optim.layout import Chunk, Segment
from ebbtide.optim.rule import AdamWState, Rule


@dataclass(frozen=True)
class _HostChunk:
    """A chunk's state as bytes in pinned host memory."""

    chunk: Chunk
    low: Tensor | None
    moments: Tensor


class StreamedBackend:
    def __init__(
        self,
        trained: Sequence[TrainedParameter],
        segments: Sequence[Segment],
        config: OptimizerConfig,
        residency: Residency,
    ) -> None:
        self._trained, self._segments, self._residency = trained, segments, residency
        self._overlap, self._kind = config.overlap, moment_dtype(config)
        chunks = cut_chunks(trained, segments, CHUNK)
        lows = iter(
            residency.allocate_host(
                "master", [2 * chunk.size for chunk, dtype in chunks if dtype != torch.float32], pinned=True
            )
        )
        moments = residency.allocate_host(
            "moments", [2 * chunk.size * self._kind.itemsize for chunk, _ in chunks], pinned=True
        )
        self._chunks = [
            _HostChunk(chunk, None if dtype == torch.float32 else next(lows), moment)
            for (chunk, dtype), moment in zip(chunks, moments, strict=True)
        ]
        self._returned: Move | None = None

    def norms(self) -> list[tuple[int, float]]:
        return device_norms(self._trained, self._segments)

    def step(self, rules: Mapping[int, Rule], since: Move) -> None:
        work = [
            host_chunk
            for host_chunk in self._chunks
            if any(segment.parameter in rules for segment in host_chunk.chunk.segments)
        ]
        largest = max((host_chunk.chunk.size for host_chunk in work), default=0)
        narrow = any(host_chunk.low is not None for host_chunk in work)
        sizes = (2 * largest if narrow else 0, 2 * largest * self._kind.itemsize)
        slots = min(SLOTS, len(work))
        with transient(RING, slots * sum(sizes)):
            ring = [
                [torch.empty(size, dtype=torch.uint8, device=self._residency.device) for size in sizes]
                for _ in range(slots)
            ]
            self._step_through(ring, work, rules)

    def _step_through(
        self, ring: Sequence[Sequence[Tensor]], work: Sequence[_HostChunk], rules: Mapping[int, Rule]
    ) -> None:
        """Steps the chunks one after the other, each in its slot of the ring."""
        mover = self._residency.mover

        def pairs(number: int) -> list[tuple[Tensor, Tensor]]:
            (low, moments), host_chunk = ring[number % SLOTS], work[number]
            found = [(moments[: host_chunk.moments.numel()], host_chunk.moments)]
            return found if host_chunk.low is None else [*found, (low[: host_chunk.low.numel()], host_chunk.low)]

        steps = build_chunk_steps(self._trained, [host_chunk.chunk for host_chunk in work], rules)
        arriving: dict[int, Move] = {}
        returned: dict[int, Move | None] = {}

        def fetch(number: int) -> None:
            if number < len(work):
                after = returned[number - SLOTS] if number >= SLOTS else self._returned
                arriving[number] = mover.move_in(pairs(number), after=after)

        for number, host_chunk in enumerate(work):
            if number == 0 or not self._overlap:
                fetch(number)
            if number == 0 and self._overlap:
                fetch(1)
            mover.compute_waits(arriving.pop(number))
            low, moments = ring[number % SLOTS]
            state = view_state(None if host_chunk.low is None else low, moments, host_chunk.chunk.size, self._kind)
            steps[number](state)
            returned[number] = self._returned = mover.move_out(pairs(number), after=None)
            if self._overlap:
                fetch(number + 2)
            else:
                mover.host_waits(self._returned)
        for name in ("master", "moments"):
            self._residency.note_writeback(name, self._returned)

    def slices(self) -> Iterator[tuple[Segment, Tensor, AdamWState]]:
        self._residency.mover.host_waits(self._returned)
        for host_chunk in self._chunks:
            state = view_state(host_chunk.low, host_chunk.moments, host_chunk.chunk.size, self._kind)
            for segment in host_chunk.chunk.segments:
                yield segment, self._weight(segment), state

    def restore(self, found: Mapping[int, FullState]) -> None:
        self._residency.mover.host_waits(self._returned)
        for host_chunk in self._chunks:
            for segment in host_chunk.chunk.segments:
                if (whole := found.get(segment.parameter)) is not None:
                    weight = self._weight(segment).cpu()
                    write_full_state(whole.part(segment), weight, self._state(host_chunk, segment))
                    self._weight(segment).copy_(weight)

    def _state(self, host_chunk: _HostChunk, segment: Segment) -> AdamWState:
        return view_state(host_chunk.low, host_chunk.moments, host_chunk.chunk.size, self._kind).part(
            segment.offset, segment.offset + segment.size
        )

    def _weight(self, segment: Segment) -> Tensor:
        return self._trained[segment.parameter].flat[segment.start : segment.stop]
