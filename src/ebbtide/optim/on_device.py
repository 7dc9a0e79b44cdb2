"""State and arithmetic both on the device. The state is the holdings `master` and `moments`, which the plan may send away between steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ebbtide.config.tree import Optimizer as OptimizerConfig
from ebbtide.memory.mover import Move
from ebbtide.memory.residency import Residency
from ebbtide.optim.layout import Segment
from ebbtide.optim.part import Exact, Trained, carve, chunk_steps, chunked, device_norms, moment_type, put
from ebbtide.optim.rule import Rule, State

CHUNK = 64 * 2**20  # elements: 128 MiB of low halves and 512 MiB of moments, long enough for a copy at link speed


class OnDevice:
    def __init__(self, trained: Sequence[Trained], segments: Sequence[Segment], config: OptimizerConfig, residency: Residency) -> None:
        self._trained, self._segments = trained, segments
        self._chunks = []
        lows, moments = [], []
        kind = moment_type(config)
        for chunk, dtype in chunked(trained, segments, CHUNK):
            low = None
            if dtype != torch.float32:
                low = torch.zeros(2 * chunk.size, dtype=torch.uint8, device=residency.device)
                lows.append(low)
            moments.append(torch.zeros(2 * chunk.size * kind.itemsize, dtype=torch.uint8, device=residency.device))
            self._chunks.append((chunk, carve(low, moments[-1], chunk.size, kind)))
        residency.hold("moments", moments)
        if lows:
            residency.hold("master", lows)

    def norms(self) -> list[tuple[int, float]]:
        return device_norms(self._trained, self._segments)

    def step(self, rules: Mapping[int, Rule], since: Move) -> None:
        steps = chunk_steps(self._trained, [chunk for chunk, _ in self._chunks], rules)
        for step, (_, state) in zip(steps, self._chunks, strict=True):
            step(state)

    def stretches(self) -> Iterator[tuple[Segment, Tensor, State]]:
        for chunk, state in self._chunks:
            for segment in chunk.segments:
                yield segment, self._weight(segment), state

    def restore(self, found: Mapping[int, Exact]) -> None:
        for chunk, state in self._chunks:
            for segment in chunk.segments:
                if (whole := found.get(segment.parameter)) is not None:
                    put(whole.part(segment), self._weight(segment), state.part(segment.offset, segment.offset + segment.size))

    def _weight(self, segment: Segment) -> Tensor:
        return self._trained[segment.parameter].flat[segment.start : segment.stop]
