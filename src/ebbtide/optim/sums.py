"""Gradients that leave the device during a backward and add up on the host, behind the compute that makes them.

They come down in batches, as each copy costs the thread that feeds the device. The first of an accumulation lands in the sum itself, a later one beside it, in a ring of
pinned memory, until threads of the host have added it.
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
from ebbtide.optim.layout import Segment
from ebbtide.optim.native import Added, Arithmetic

ALIGNMENT = 128  # bytes: where a gradient lands


class _Arrival(NamedTuple):
    grad: Tensor
    """On the device."""
    total: Tensor
    """On the host."""

    @property
    def size(self) -> int:
        """Bytes that it takes where it lands."""
        return -(-self.grad.nbytes // ALIGNMENT) * ALIGNMENT


class Sums:
    def __init__(self, landing: Tensor, batch: int, mover: Mover, math: Arithmetic) -> None:
        """`landing`: pinned bytes, of several batches of so many bytes each."""
        self._ring, self._batch, self._mover, self._math = Ring(landing, mover), batch, mover, math
        self._adder = ThreadPoolExecutor(1, "ebbtide-gradients")  # one, so that they add up in the order in which they come
        self.waiting: dict[Segment, _Arrival] = {}
        """Until there are enough for a batch, or it is sent as it is."""
        self._waiting_bytes = 0
        self._arrived: set[Segment] = set()  # in this accumulation
        self._adding: list[Future[None]] = []
        self._squares: dict[Segment, float] = {}  # of the sums so far; the adder writes them

    def take(self, segment: Segment, grad: Tensor, total: Tensor) -> None:
        """Adds a segment's gradient to its sum, at some time before `squares` says so."""
        arrival = _Arrival(grad, total)
        if segment in self.waiting or self._waiting_bytes + arrival.size > self._batch:
            self.send()
        self.waiting[segment] = arrival
        self._waiting_bytes += arrival.size

    def send(self) -> None:
        """What waits comes down, after what compute has queued so far."""
        if self.waiting:
            batch, self.waiting, self._waiting_bytes = self.waiting, {}, 0
            later = sum(one.size for segment, one in batch.items() if segment in self._arrived)
            begin = partial(self._begin, batch)
            self._adding.append(self._ring.take(later, begin) if later else begin(None))
            self._arrived.update(batch)

    def _begin(self, batch: Mapping[Segment, _Arrival], landing: Tensor | None) -> Future[None]:
        sums, pairs, start = [], [], 0
        for segment, one in batch.items():
            part = None
            if landing is not None and segment in self._arrived:
                part = landing[start : start + one.grad.nbytes].view(one.grad.dtype)
                start += one.size
            sums.append(Added(one.total, part))
            pairs.append((as_bytes(one.grad), as_bytes(one.total if part is None else part)))
        add = self._math.add(sums)
        return self._adder.submit(self._settle, self._mover.move_out(pairs, after=None), list(batch), add)

    def _settle(self, move: Move, segments: Sequence[Segment], add: Callable[[], list[float]]) -> None:
        """On the adder: once the copies are over."""
        if move.done is not None:
            move.done.synchronize()
        self._squares.update(zip(segments, add(), strict=True))

    def squares(self) -> Mapping[Segment, float]:
        """Of all that was taken in this accumulation: the sum of each sum's squares, once all have come."""
        self.send()
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
    """Bytes that are handed out one stretch after the other, and from the start again."""

    def __init__(self, data: Tensor, mover: Mover) -> None:
        self._data, self._mover, self._next = data, mover, 0
        self._used: deque[tuple[int, int, Future[None]]] = deque()  # start, stop, what is done with it; in the order of the ring

    def take(self, size: int, begin: Callable[[Tensor], Future[None]]) -> Future[None]:
        """Hands out `size` bytes, once nothing uses them any more, until what `begin` begins is over."""
        start = self._next if self._next + size <= len(self._data) else 0
        while any(first < start + size and start < stop for first, stop, _ in self._used):
            self._mover.host_waits(self._used.popleft()[2])
        done = begin(self._data[start : start + size])
        self._used.append((start, start + size, done))
        self._next = start + size
        return done


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)
