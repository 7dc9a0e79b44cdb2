"""Measures each phase: seconds, and the peak of device memory (on a CPU: of the process)."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

Phase = Literal["generate", "score", "logprob", "train", "step", "evaluate"]
GIB = 2**30


class Meter:
    """`with meter.phase("generate"):` around each phase; `take()` gives and clears what was measured."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.seconds: dict[Phase, float] = {}
        self.peaks: dict[Phase, int] = {}

    @contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        on_gpu = self._device.type == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(self._device)
        start = time.perf_counter()
        try:
            yield
        finally:
            if on_gpu:
                torch.cuda.current_stream(self._device).synchronize()  # the phase's own compute, not moves beside it
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
            peak = torch.cuda.max_memory_allocated(self._device) if on_gpu else _process_peak()
            self.peaks[name] = max(self.peaks.get(name, 0), peak)

    def take(self) -> dict[str, float]:
        figures = {f"seconds/{name}": seconds for name, seconds in self.seconds.items()}
        figures |= {f"peak_gib/{name}": peak / GIB for name, peak in self.peaks.items()}
        figures["peak_gib"] = max(self.peaks.values(), default=0) / GIB
        self.seconds, self.peaks = {}, {}
        return figures


def _process_peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
