"""The bytes of each row at the peak of a phase. A part that allocates memory within a phase says so around it:
`with transient("kv_cache", size):`.

The allocator keeps its peak but not the moment of it. So the phase is cut at marks, wherever a row is about to change:
if the peak has grown since the last mark, it lies between the two, and the rows of that time are those of the peak.
"""

from __future__ import annotations

import resource
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from ebbtide.memory.plan import HoldingName


class Gauge:
    """Measures one phase, from its begin to `close`."""

    def __init__(self, device: torch.device, held: Callable[[], Mapping[HoldingName, int]]) -> None:
        """`held` gives the bytes on the device of each holding that the residency has."""
        self._device, self._held = device, held
        self._lock = threading.Lock()  # a backward runs on a thread of its own
        self._last = dict(held())
        self._transient: Counter[HoldingName] = Counter()
        self._failed: Counter[HoldingName] = Counter()
        self.rows: dict[HoldingName, int] = dict(self._last)
        """The rows at the peak so far. On a CPU, where the peak is the process's, the most of each row."""
        self.peak = self._peak()
        self._unexplained = self.peak - sum(self._last.values())
        """Bytes that were allocated when the phase began and belong to no row: the workspace of what runs again and
        again, such as buffers of CUDA graphs and of cuBLAS."""

    @property
    def _on_gpu(self) -> bool:
        return self._device.type == "cuda"

    def _peak(self) -> int:
        return int(torch.cuda.max_memory_allocated(self._device)) if self._on_gpu else process_peak()

    def mark(self) -> None:
        """Called where a row changes: attributes the peak since the last mark, if it is a new one."""
        with self._lock:
            self._mark()

    def _mark(self) -> None:
        if not self._on_gpu:
            for name, size in self._transient.items():
                self.rows[name] = max(self.rows.get(name, 0), size)
            return
        peak, before = self._peak(), self._last
        self._last = now = dict(self._held())
        if peak > self.peak:
            held = {name: max(now.get(name, 0), before.get(name, 0)) for name in {**before, **now}}
            self.peak = peak
            self.rows = held | {name: held.get(name, 0) + size for name, size in self._transient.items() if size}

    @contextmanager
    def transient(self, name: HoldingName, size: int) -> Iterator[None]:
        """Within this context `size` more bytes belong to a row."""
        self._add(name, size)
        try:
            yield
        except torch.OutOfMemoryError:
            self._failed[name] += size
            raise
        finally:
            self._add(name, -size)

    def _add(self, name: HoldingName, size: int) -> None:
        with self._lock:
            self._mark()
            self._transient[name] += size

    def close(self, rest: HoldingName | None) -> None:
        """Ends the phase. What it allocated beyond its begin, and that no other row explains, belongs to the row
        `rest`, if the phase has such a row."""
        with self._lock:
            self._transient += self._failed
            self._mark()
            if not self._on_gpu:
                self.peak = self._peak()
                for name, size in self._held().items():
                    self.rows[name] = max(self.rows.get(name, 0), size)
                return
            grown = self.peak - sum(self.rows.values()) - max(0, self._unexplained)
            if rest is not None and grown > 0:
                self.rows[rest] = self.rows.get(rest, 0) + grown


_gauge: Gauge | None = None  # of the phase that is being measured; a process is in one phase at a time


@contextmanager
def measuring(gauge: Gauge) -> Iterator[Gauge]:
    """Within this context, `transient` and `mark` report to this gauge."""
    global _gauge
    before, _gauge = _gauge, gauge
    try:
        yield gauge
    finally:
        _gauge = before


@contextmanager
def transient(name: HoldingName, size: int) -> Iterator[None]:
    """Around what allocates `size` bytes on the device and frees them at the end. Outside of a phase it does
    nothing."""
    if _gauge is None:
        yield
    else:
        with _gauge.transient(name, size):
            yield


def mark() -> None:
    """Called where a holding that comes and goes, such as gradients, has grown."""
    if _gauge is not None:
        _gauge.mark()


def process_peak() -> int:
    """The peak of this process's memory in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
