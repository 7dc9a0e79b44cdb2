"""State in pinned host memory, stepped on the device: chunk k+1 arrives while k is stepped and k-1 returns, both directions of the link at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ebbtide.config.tree import Optimizer as OptimizerConfig
from ebbtide.memory.mover import Move
from ebbtide.memory.residency import Residency
from ebbtide.optim.layout import Chunk, Segment
from ebbtide.optim.part import Exact, Trained, carve, chunk_steps, chunked, device_norms, moment_type, put
from ebbtide.optim.rule import Rule, State
from ebbtide.optim.sizes import STREAMED_CHUNK as CHUNK
from ebbtide.optim.sizes import STREAMED_SLOTS as SLOTS


@dataclass(frozen=True)
class _HostChunk:
    chunk: Chunk
    low: Tensor | None  # bytes
    moments: Tensor  # bytes


class Streamed:
    def __init__(self, trained: Sequence[Trained], segments: Sequence[Segment], config: OptimizerConfig, residency: Residency) -> None:
        self._trained, self._segments, self._residency = trained, segments, residency
        self._overlap, self._kind = config.overlap, moment_type(config)
        chunks = chunked(trained, segments, CHUNK)
        lows = iter(residency.host("master", [2 * chunk.size for chunk, dtype in chunks if dtype != torch.float32], pinned=True))
        moments = residency.host("moments", [2 * chunk.size * self._kind.itemsize for chunk, _ in chunks], pinned=True)
        self._chunks = [
            _HostChunk(chunk, None if dtype == torch.float32 else next(lows), moment)
            for (chunk, dtype), moment in zip(chunks, moments, strict=True)
        ]
        self._returned: Move | None = None

    def norms(self) -> list[tuple[int, float]]:
        return device_norms(self._trained, self._segments)

    def step(self, rules: Mapping[int, Rule], since: Move) -> None:
        mover, device = self._residency.mover, self._residency.device
        work = [held for held in self._chunks if any(segment.parameter in rules for segment in held.chunk.segments)]
        largest = max((held.chunk.size for held in work), default=0)
        narrow = any(held.low is not None for held in work)
        sizes = (2 * largest if narrow else 0, 2 * largest * self._kind.itemsize)
        ring = [[torch.empty(size, dtype=torch.uint8, device=device) for size in sizes] for _ in range(min(SLOTS, len(work)))]

        def pairs(number: int) -> list[tuple[Tensor, Tensor]]:
            (low, moments), held = ring[number % SLOTS], work[number]
            found = [(moments[: held.moments.numel()], held.moments)]
            return found if held.low is None else [*found, (low[: held.low.numel()], held.low)]

        steps = chunk_steps(self._trained, [held.chunk for held in work], rules)
        arriving: dict[int, Move] = {}
        returned: dict[int, Move | None] = {}

        def fetch(number: int) -> None:
            if number < len(work):
                after = returned[number - SLOTS] if number >= SLOTS else self._returned
                arriving[number] = mover.move_in(pairs(number), after=after)

        for number, held in enumerate(work):
            if number == 0 or not self._overlap:
                fetch(number)
            if number == 0 and self._overlap:
                fetch(1)
            mover.compute_waits(arriving.pop(number))
            low, moments = ring[number % SLOTS]
            state = carve(None if held.low is None else low, moments, held.chunk.size, self._kind)
            steps[number](state)
            returned[number] = self._returned = mover.move_out(pairs(number), after=None)
            if self._overlap:
                fetch(number + 2)
            else:
                mover.host_waits(self._returned)
        for name in ("master", "moments"):
            self._residency.returning(name, self._returned)

    def stretches(self) -> Iterator[tuple[Segment, Tensor, State]]:
        self._residency.mover.host_waits(self._returned)
        for held in self._chunks:
            state = carve(held.low, held.moments, held.chunk.size, self._kind)
            for segment in held.chunk.segments:
                yield segment, self._weight(segment), state

    def restore(self, found: Mapping[int, Exact]) -> None:
        self._residency.mover.host_waits(self._returned)
        for held in self._chunks:
            for segment in held.chunk.segments:
                if (whole := found.get(segment.parameter)) is not None:
                    weight = self._weight(segment).cpu()
                    put(whole.part(segment), weight, self._state(held, segment))
                    self._weight(segment).copy_(weight)

    def _state(self, held: _HostChunk, segment: Segment) -> State:
        return carve(held.low, held.moments, held.chunk.size, self._kind).part(segment.offset, segment.offset + segment.size)

    def _weight(self, segment: Segment) -> Tensor:
        return self._trained[segment.parameter].flat[segment.start : segment.stop]
