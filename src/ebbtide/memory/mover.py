"""Copies between device and host: two streams out, two in, kept for the whole run; ordered by events, never by a device-wide sync.

On a CPU both pools are ordinary memory, the copies are plain ones, and every second of them is exposed.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Bytes that are copied at once. A direction's slices alternate between two streams, each after the one before: so the copy engine is free for a moment at
# the end of each, and a phase's own small copies (token ids in, a flag out) get their turn there. Queued on one stream, 20 GB of slices of any
# size held up the first small copy of a training step until all of them were over: 0.37 s on an H200, against 0.02 s in turns. 64 MiB take
# 1.2 ms, and still run at 55.2 GB/s.
SLICE = 64 * 2**20


@dataclass
class Move:
    """A transfer under way: `done` orders others after it; None on a CPU, where it is over when it is made."""

    done: torch.cuda.Event | None


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
        self._on_gpu = device.type == "cuda"
        self._tally = Tally()
        # (figure, first event, last event): read once they are over, as reading them earlier would wait for them.
        self._pending: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        if self._on_gpu:
            self._out, self._in, self._aside = ((torch.cuda.Stream(device), torch.cuda.Stream(device)) for _ in range(3))

    def move_out(self, pairs: Iterable[tuple[Tensor, Tensor]], after: Move | None, *, held: bool = False) -> Move:
        """Copies flat device bytes to flat host bytes, after what compute has queued so far and after `after`.

        The device memory may be freed at once: the allocator keeps it until the copies are over. With `held` the caller keeps it until compute has
        waited for the move: then the allocator hands it out again in the order of compute, however far the host is ahead.
        """
        copies = [(host, device) for device, host in pairs]
        self._tally.bytes_out += sum(host.numel() for host, _ in copies)
        if not self._on_gpu:
            return self._copied_here(copies, "seconds_out")
        for _, device in copies if not held else ():
            _used_by(device, self._out)
        return self._copied(copies, self._out, after, "seconds_out")

    def move_in(self, pairs: Iterable[tuple[Tensor, Tensor]], after: Move | None, *, held: bool = False) -> Move:
        """Copies flat host bytes to flat device bytes, after `after` and after what compute has queued so far, as that may still use their memory.

        `held` is as in `move_out`.
        """
        copies = list(pairs)
        self._tally.bytes_in += sum(device.numel() for device, _ in copies)
        if not self._on_gpu:
            return self._copied_here(copies, "seconds_in")
        for device, _ in copies if not held else ():
            _used_by(device, self._in)
        return self._copied(copies, self._in, after, "seconds_in")

    def move_in_aside(self, pairs: Iterable[tuple[Tensor, Tensor]], since: Move) -> Move:
        """As `move_in`, for memory that nothing has used since `since`: it waits neither for compute nor for the other moves."""
        copies = list(pairs)
        self._tally.bytes_in += sum(device.numel() for device, _ in copies)
        if not self._on_gpu:
            return self._copied_here(copies, "seconds_in")
        return self._copied(copies, self._aside, since, "seconds_in", ordered=False)

    def mark(self) -> Move:
        """What compute has queued so far, for others to come after."""
        if not self._on_gpu:
            return Move(None)
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(self.device))
        return Move(done)

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

    def host_waits(self, move: Move | Future[Any] | None) -> None:
        """The host goes on only after `move`, or after a thread that works on what was moved."""
        start = time.perf_counter()
        if isinstance(move, Future):
            move.result()
        elif move is not None and move.done is not None:
            move.done.synchronize()
        self._tally.exposed += time.perf_counter() - start

    def rate_out(self) -> float:
        """Bytes a second to the host, as measured now with pinned memory."""
        device, host = torch.empty(2**28, dtype=torch.uint8, device=self.device), torch.empty(2**28, dtype=torch.uint8, pin_memory=True)
        taken = []
        for _ in range(3):
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            host.copy_(device, non_blocking=True)
            last.record()
            last.synchronize()
            taken.append(first.elapsed_time(last) / 1000)
        return float(host.numel() / min(taken))

    def finish(self) -> None:
        """Waits until every move is over."""
        for _, _, last in self._pending:
            last.synchronize()

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

    def _copied(
        self,
        copies: list[tuple[Tensor, Tensor]],
        streams: tuple[torch.cuda.Stream, torch.cuda.Stream],
        after: Move | None,
        name: str,
        ordered: bool = True,
    ) -> Move:
        """Each (target, source), slice after slice."""
        if ordered:
            streams[0].wait_stream(torch.cuda.current_stream(self.device))
        if after is not None and after.done is not None:
            streams[0].wait_event(after.done)
        started, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        started.record(streams[0])
        last, turn = started, torch.cuda.Event()
        for number, some in enumerate(_slices(copies)):
            stream = streams[number % 2]
            stream.wait_event(last)
            with torch.cuda.stream(stream):
                for target, source in some:
                    target.copy_(source, non_blocking=True)
            last = turn
            last.record(stream)
        streams[0].wait_event(last)
        done.record(streams[0])
        self._pending.append((name, started, done))
        return Move(done)

    def _copied_here(self, copies: list[tuple[Tensor, Tensor]], name: str) -> Move:
        start = time.perf_counter()
        for target, source in copies:
            target.copy_(source)
        seconds = time.perf_counter() - start
        setattr(self._tally, name, getattr(self._tally, name) + seconds)
        self._tally.exposed += seconds
        return Move(None)


def _slices(copies: Iterable[tuple[Tensor, Tensor]]) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Copies of `SLICE` bytes or less each: parts of large tensors, several small ones together."""
    some: list[tuple[Tensor, Tensor]] = []
    room = SLICE
    for target, source in copies:
        for start in range(0, source.numel(), SLICE):
            part = target[start : start + SLICE], source[start : start + SLICE]
            if part[0].numel() > room:
                yield some
                some, room = [], SLICE
            some.append(part)
            room -= part[0].numel()
    if some:
        yield some


def _used_by(device: Tensor, streams: tuple[torch.cuda.Stream, torch.cuda.Stream]) -> None:
    """Tells the allocator not to hand this memory out again, once it is freed, before both streams are done with it."""
    for stream in streams:
        device.record_stream(stream)
