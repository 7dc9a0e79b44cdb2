"""The device backend of the optimizer: state and arithmetic are both on the device. The state is the holdings `master`
and `moments`, which the plan may offload between steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ebbtide.config.optimizer import OptimizerConfig
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
from ebbtide.optim.layout import Segment
from ebbtide.optim.rule import AdamWState, Rule

CHUNK = 64 * 2**20  # elements: 128 MiB of low halves, 512 MiB of moments; copies this long run at host link speed


class DeviceBackend:
    def __init__(
        self,
        trained: Sequence[TrainedParameter],
        segments: Sequence[Segment],
        config: OptimizerConfig,
        residency: Residency,
    ) -> None:
        self._trained, self._segments = trained, segments
        self._chunks = []
        lows, moments = [], []
        kind = moment_dtype(config)
        for chunk, dtype in cut_chunks(trained, segments, CHUNK):
            low = None
            if dtype != torch.float32:
                low = torch.zeros(2 * chunk.size, dtype=torch.uint8, device=residency.device)
                lows.append(low)
            moments.append(torch.zeros(2 * chunk.size * kind.itemsize, dtype=torch.uint8, device=residency.device))
            self._chunks.append((chunk, view_state(low, moments[-1], chunk.size, kind)))
        residency.register("moments", moments)
        if lows:
            residency.register("master", lows)

    def norms(self) -> list[tuple[int, float]]:
        return device_norms(self._trained, self._segments)

    def step(self, rules: Mapping[int, Rule], since: Move) -> None:
        steps = build_chunk_steps(self._trained, [chunk for chunk, _ in self._chunks], rules)
        for step, (_, state) in zip(steps, self._chunks, strict=True):
            step(state)

    def slices(self) -> Iterator[tuple[Segment, Tensor, AdamWState]]:
        for chunk, state in self._chunks:
            for segment in chunk.segments:
                yield segment, self._weight(segment), state

    def restore(self, found: Mapping[int, FullState]) -> None:
        for chunk, state in self._chunks:
            for segment in chunk.segments:
                if (whole := found.get(segment.parameter)) is not None:
                    write_full_state(
                        whole.part(segment),
                        self._weight(segment),
                        state.part(segment.offset, segment.offset + segment.size),
                    )

    def _weight(self, segment: Segment) -> Tensor:
        return self._trained[segment.parameter].flat[segment.start : segment.stop]
