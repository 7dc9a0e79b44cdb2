"""Where the HTTP server and the thread that owns the engine meet.

The server's side (`submit`, `withdraw`, `close`) runs in the event loop alone, so its state needs no locks. The engine's side takes jobs from a queue, looks at
`Job.over`, and sends what came of each step back as one call of the event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Literal

from ebbtide.rollout.engine import Request, Sampling
from ebbtide.rollout.serve.error import ApiError


@dataclass(frozen=True, slots=True)
class Piece:
    """New tokens of one sample."""

    index: int
    tokens: list[int]
    logprobs: list[float]
    """At temperature 1, whatever they were sampled at."""
    finish: Literal["stop", "length"] | None


@dataclass(eq=False)
class Job:
    """What one HTTP request asks for."""

    requests: list[Request]
    sampling: Sampling
    cut: Callable[[], None]
    """Ends the connection of a client that does not take its answer."""
    events: asyncio.Queue[Piece | ApiError] = field(default_factory=asyncio.Queue)
    over: bool = False
    """Nobody waits for it any more."""

    @property
    def samples(self) -> int:
        return sum(len(request.seeds) for request in self.requests)


class Desk:
    def __init__(self, room: int, stop_seconds: float = 0.0) -> None:
        """`room` samples may wait or run, and as many more may have ended that their clients have not taken."""
        self._room, self._stop_seconds = room, stop_seconds
        self._jobs: dict[Job, int] = {}  # those that the engine has not ended, with the samples that it has not
        self._untaken: dict[Job, int] = {}  # those that it has, with all their samples, the oldest first
        self._closed: tuple[int, str] | None = None
        self._inbox: SimpleQueue[Job | None] = SimpleQueue()
        self.loop: asyncio.AbstractEventLoop | None = None
        """The server's, once it runs."""
        self._lost = False
        self.stops = 0
        """How often it was asked to stop."""
        self._stopped = 0.0

    # The server's side

    @property
    def closed(self) -> ApiError | None:
        """Why nothing more is taken."""
        if self._closed is None and self.stops:
            return ApiError(503, "the server is stopping: it takes no new requests")
        return None if self._closed is None else ApiError(*self._closed)

    @property
    def samples(self) -> int:
        """That wait or run."""
        return sum(self._jobs.values())

    def submit(self, job: Job) -> None:
        if (closed := self.closed) is not None:
            raise closed
        if self.samples + job.samples > self._room:
            raise ApiError(
                429, f"{self.samples} of the {self._room} samples that may wait or run are taken: try again later", code="queue_full"
            )
        self._jobs[job] = job.samples
        self._inbox.put(job)

    def withdraw(self, job: Job) -> None:
        """It is answered, or its client is gone."""
        job.over = True
        job.requests = []
        self._jobs.pop(job, None)
        self._untaken.pop(job, None)

    def close(self, status: int, message: str) -> None:
        """Every job that the engine has not ended ends with this, and so does every later one."""
        self._closed = status, message
        for job in self._jobs:
            job.events.put_nowait(ApiError(status, message))

    def _deliver(self, news: Sequence[tuple[Job, Piece]]) -> None:
        for job, piece in news:
            job.events.put_nowait(piece)
            if piece.finish is not None and job in self._jobs:
                self._jobs[job] -= 1
                if not self._jobs[job]:
                    del self._jobs[job]
                    self._untaken[job] = job.samples
        # A client that does not take its answer must neither keep others from asking nor fill the memory.
        while sum(self._untaken.values()) > self._room:
            slowest = next(iter(self._untaken))
            del self._untaken[slowest]
            slowest.cut()

    # Of any thread, and of a signal's handler: a SimpleQueue bears being interrupted by itself

    def stop(self) -> None:
        """No new jobs; those there are may end. The second time: at once."""
        self._stopped = self._stopped or time.monotonic()
        self.stops += 1
        self._inbox.put(None)

    @property
    def seconds_left(self) -> float:
        """Before all must end, once it was asked to stop."""
        return max(self._stopped + self._stop_seconds - time.monotonic(), 0.0) if self.stops == 1 else 0.0

    def lose(self) -> None:
        """The server has ended."""
        self._lost = True
        self._inbox.put(None)

    # The engine's side

    def take(self, *, wait: bool) -> list[Job]:
        """New jobs; where there are none, waits for one or for a stop."""
        if wait and self._lost:
            raise RuntimeError("the HTTP server has ended by itself")
        found: list[Job | None] = []
        try:
            while True:
                found.append(self._inbox.get(block=wait and not found))
        except Empty:
            return [job for job in found if job is not None and not job.over]

    def tell(self, news: Sequence[tuple[Job, Piece]]) -> None:
        if news:
            self.call(self._deliver, news)

    def call(self, function: Callable[..., None], *arguments: object) -> None:
        """In the event loop, unless the server has ended."""
        if not self._lost:
            assert self.loop is not None
            self.loop.call_soon_threadsafe(function, *arguments)
