"""Gradients that are offloaded during a backward and accumulated on the host, hidden behind the rest of the backward.

They are copied in batches, as each copy costs the thread that launches the device's kernels. The first gradient of an
accumulation is copied into the sum itself, a later one into a ring of pinned memory, until threads on the host have
added it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ebbtide.memory.mover import Move, Mover
from ebbtide.optim.cpu_kernels import CpuAddArgs, CpuMath
from ebbtide.optim.layout import Segment
from ebbtide.system.units import ceil_div

ALIGNMENT = 128  # bytes: where a gradient starts in the ring


class _Arrival(NamedTuple):
    """A gradient that is to be added to a sum on the host."""

    grad: Tensor
    """The gradient on the device."""
    total: Tensor
    """Its sum on the host."""

    @property
    def size(self) -> int:
        """The bytes that it takes in the ring."""
        return ceil_div(self.grad.nbytes, ALIGNMENT) * ALIGNMENT


class HostGradAccumulator:
    """Sums of gradients on the host, and their sums of squares."""

    def __init__(self, landing: Tensor, batch: int, mover: Mover, math: CpuMath) -> None:
        """`landing` is pinned memory for several batches of `batch` bytes each."""
        self._ring, self._batch, self._mover, self._math = Ring(landing, mover), batch, mover, math
        # One thread, so that gradients are added in the order in which they come.
        self._adder = ThreadPoolExecutor(1, "ebbtide-gradients")
        self.waiting: dict[Segment, _Arrival] = {}
        """Gradients that wait until there are enough for a batch, or until `flush`."""
        self._waiting_bytes = 0
        self._arrived: set[Segment] = set()  # in this accumulation
        self._adding: list[Future[None]] = []
        self._squares: dict[Segment, float] = {}  # sums of squares so far; the adder thread writes them

    def add(self, segment: Segment, grad: Tensor, total: Tensor) -> None:
        """Adds a segment's gradient to its sum, some time before `wait_for_squares` returns."""
        arrival = _Arrival(grad, total)
        if segment in self.waiting or self._waiting_bytes + arrival.size > self._batch:
            self.flush()
        self.waiting[segment] = arrival
        self._waiting_bytes += arrival.size

    def flush(self) -> None:
        """Starts to copy the waiting gradients to the host, after what compute has queued so far."""
        if self.waiting:
            batch, self.waiting, self._waiting_bytes = self.waiting, {}, 0
            later = sum(one.size for segment, one in batch.items() if segment in self._arrived)
            begin = partial(self._begin, batch)
            self._adding.append(self._ring.lend(later, begin) if later else begin(None))
            self._arrived.update(batch)

    def _begin(self, batch: Mapping[Segment, _Arrival], landing: Tensor | None) -> Future[None]:
        sums, pairs, start = [], [], 0
        for segment, one in batch.items():
            part = None
            if landing is not None and segment in self._arrived:
                part = landing[start : start + one.grad.nbytes].view(one.grad.dtype)
                start += one.size
            sums.append(CpuAddArgs(one.total, part))
            pairs.append((as_bytes(one.grad), as_bytes(one.total if part is None else part)))
        add = self._math.add(sums)
        return self._adder.submit(self._settle, self._mover.move_out(pairs, after=None), list(batch), add)

    def _settle(self, move: Move, segments: Sequence[Segment], add: Callable[[], list[float]]) -> None:
        """Adds a batch, on the adder thread, once its copies are over."""
        if move.done is not None:
            move.done.synchronize()
        self._squares.update(zip(segments, add(), strict=True))

    def wait_for_squares(self) -> Mapping[Segment, float]:
        """The sum of squares of each segment's sum, once all gradients of this accumulation are added."""
        self.flush()
        self._finish()
        return self._squares

    def clear(self) -> None:
        """Begins a new accumulation."""
        self.waiting, self._waiting_bytes = {}, 0
        try:
            self._finish()  # nothing may land in the next sums
        finally:
            self._arrived.clear()
            self._squares.clear()

    def _finish(self) -> None:
        adding, self._adding = self._adding, []
        for task in adding:
            task.result()


class Ring:
    """A ring buffer: ranges of its bytes are lent in order, and after the end from the start again."""

    def __init__(self, data: Tensor, mover: Mover) -> None:
        self._data, self._mover, self._next = data, mover, 0
        # (start, stop, the work that uses the range), in the order of the ring
        self._used: deque[tuple[int, int, Future[None]]] = deque()

    def lend(self, size: int, begin: Callable[[Tensor], Future[None]]) -> Future[None]:
        """Lends `size` bytes to the work that `begin` starts, until it is over; waits first until nothing else uses
        them."""
        start = self._next if self._next + size <= len(self._data) else 0
        while any(first < start + size and start < stop for first, stop, _ in self._used):
            self._mover.host_waits(self._used.popleft()[2])
        done = begin(self._data[start : start + size])
        self._used.append((start, start + size, done))
        self._next = start + size
        return done


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)
