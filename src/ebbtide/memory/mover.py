"""Copies between device and host: one stream out, one stream in, kept for the whole run; ordered by events, never by a device-wide sync.

On a CPU both pools are ordinary memory, the copies are plain ones, and every second of them is exposed.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Move:
    """A transfer under way: `done` orders others after it; None on a CPU, where it is over when it is made."""

    bytes: int
    done: torch.cuda.Event | None
    started: torch.cuda.Event | None


@dataclass
class Tally:
    """What moved since it was last read."""

    bytes_out: int = 0
    bytes_in: int = 0
    seconds_out: float = 0.0
    seconds_in: float = 0.0
    exposed: float = 0.0
    """Seconds that compute waited for a move."""


class Mover:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.on_gpu = device.type == "cuda"
        self._tally = Tally()
        # (figure, first event, last event): read once they are over, as reading them earlier would wait for them.
        self._pending: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        if self.on_gpu:
            self._out, self._in = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def move_out(self, pairs: Iterable[tuple[Tensor, Tensor]], after: Move | None) -> Move:
        """Copies each device tensor to its host tensor, after what compute has queued so far and after `after`.

        The device tensors may be freed at once: the allocator keeps their memory until the copies are over.
        """
        pairs = list(pairs)
        size = sum(source.nbytes for source, _ in pairs)
        self._tally.bytes_out += size
        if not self.on_gpu:
            return self._copied_here([(host, device) for device, host in pairs], size, "seconds_out")
        self._out.wait_stream(torch.cuda.current_stream(self.device))
        _wait(self._out, after)
        move = self._begin(self._out, size)
        with torch.cuda.stream(self._out):
            for source, target in pairs:
                target.copy_(source, non_blocking=True)
                source.record_stream(self._out)
        return self._end(move, self._out, "seconds_out")

    def move_in(self, pairs: Iterable[tuple[Tensor, Tensor]], after: Move | None) -> Move:
        """Copies each host tensor to its device tensor, which was allocated just now, and after `after`."""
        pairs = list(pairs)
        size = sum(target.nbytes for target, _ in pairs)
        self._tally.bytes_in += size
        if not self.on_gpu:
            return self._copied_here(pairs, size, "seconds_in")
        # The new memory may have belonged to something that compute is not done with yet.
        self._in.wait_stream(torch.cuda.current_stream(self.device))
        _wait(self._in, after)
        move = self._begin(self._in, size)
        with torch.cuda.stream(self._in):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
                target.record_stream(self._in)
        return self._end(move, self._in, "seconds_in")

    def compute_waits(self, move: Move) -> None:
        """Compute goes on only after `move`; the time that it stands still is counted as exposed."""
        if move.done is None:
            return
        stream = torch.cuda.current_stream(self.device)
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record(stream)
        stream.wait_event(move.done)
        after.record(stream)
        self._pending.append(("exposed", before, after))

    def host_waits(self, move: Move | None) -> None:
        """The host goes on only after `move`."""
        if move is not None and move.done is not None:
            start = time.perf_counter()
            move.done.synchronize()
            self._tally.exposed += time.perf_counter() - start

    def take(self) -> Tally:
        """What moved since the last call. A move that is still under way gives its seconds to a later one."""
        later = []
        for name, first, last in self._pending:
            if last.query():
                setattr(self._tally, name, getattr(self._tally, name) + first.elapsed_time(last) / 1000)
            else:
                later.append((name, first, last))
        self._pending = later
        tally, self._tally = self._tally, Tally()
        return tally

    def _begin(self, stream: torch.cuda.Stream, size: int) -> Move:
        started, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        started.record(stream)
        return Move(size, done, started)

    def _end(self, move: Move, stream: torch.cuda.Stream, name: str) -> Move:
        assert move.done is not None
        assert move.started is not None
        move.done.record(stream)
        self._pending.append((name, move.started, move.done))
        return move

    def _copied_here(self, pairs: list[tuple[Tensor, Tensor]], size: int, name: str) -> Move:
        start = time.perf_counter()
        for target, source in pairs:
            target.copy_(source)
        seconds = time.perf_counter() - start
        setattr(self._tally, name, getattr(self._tally, name) + seconds)
        self._tally.exposed += seconds
        return Move(size, None, None)


def _wait(stream: torch.cuda.Stream, move: Move | None) -> None:
    if move is not None and move.done is not None:
        stream.wait_event(move.done)
