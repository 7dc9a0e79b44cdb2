"""The queue between the HTTP server and the thread that owns the engine.

The server's side (`submit`, `withdraw`, `close`) runs only in the event loop, so its state needs no locks. The engine's
side takes requests from a thread-safe queue, reads `QueuedRequest.over`, and sends the tokens of each engine step back
as one call in the event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Literal

from ebbtide.rollout.engine import Request, SamplingParams
from ebbtide.rollout.serve.error import ApiError


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """New tokens of one sample."""

    index: int
    tokens: list[int]
    logprobs: list[float]
    """The log-probs at temperature 1, whatever temperature they were sampled at."""
    finish: Literal["stop", "length"] | None


@dataclass(eq=False)
class QueuedRequest:
    """One HTTP request: its prompts, how to sample, and the events of its samples."""

    requests: list[Request]
    sampling: SamplingParams
    disconnect: Callable[[], None]
    """Closes the connection of a client that does not receive its response."""
    events: asyncio.Queue[TokenEvent | ApiError] = field(default_factory=asyncio.Queue)
    is_over: bool = False
    """Whether it has been answered, or its client has disconnected."""

    @property
    def sample_count(self) -> int:
        return sum(len(request.seeds) for request in self.requests)


class RequestQueue:
    """The requests that wait, run, or have been answered but not yet received."""

    def __init__(self, room: int, stop_seconds: float = 0.0) -> None:
        """At most `room` samples wait or run, and as many more are finished and not yet received by their clients."""
        self._room, self._stop_seconds = room, stop_seconds
        self._unfinished: dict[QueuedRequest, int] = {}  # request -> samples that the engine has not finished
        # Finished requests whose responses their clients have not received -> all their samples; the oldest first.
        self._undelivered: dict[QueuedRequest, int] = {}
        self._closed: tuple[int, str] | None = None
        self._inbox: SimpleQueue[QueuedRequest | None] = SimpleQueue()
        self.loop: asyncio.AbstractEventLoop | None = None
        """The event loop of the server, once it runs."""
        self._lost = False
        self.stop_count = 0
        """The number of times it was told to stop."""
        self._stopped = 0.0

    # The server's side: called in the event loop

    @property
    def closed_error(self) -> ApiError | None:
        """The error for new requests, if no more are accepted."""
        if self._closed is None and self.stop_count:
            return ApiError(503, "the server is stopping and accepts no new requests")
        return None if self._closed is None else ApiError(*self._closed)

    @property
    def pending_samples(self) -> int:
        """The number of samples that wait or run."""
        return sum(self._unfinished.values())

    def submit(self, queued: QueuedRequest) -> None:
        """Accepts a request, or raises if the queue is full or closed."""
        if (closed := self.closed_error) is not None:
            raise closed
        if self.pending_samples + queued.sample_count > self._room:
            raise ApiError(
                429,
                f"the queue is full: {self.pending_samples} of at most {self._room} samples wait or run. Try again"
                " later",
                code="queue_full",
            )
        self._unfinished[queued] = queued.sample_count
        self._inbox.put(queued)

    def withdraw(self, queued: QueuedRequest) -> None:
        """Removes a request that has been answered or whose client has disconnected."""
        queued.is_over = True
        queued.requests = []
        self._unfinished.pop(queued, None)
        self._undelivered.pop(queued, None)

    def close(self, status: int, message: str) -> None:
        """Fails every request that the engine has not finished, and every later one, with this error."""
        self._closed = status, message
        for queued in self._unfinished:
            queued.events.put_nowait(ApiError(status, message))

    def _deliver(self, events: Sequence[tuple[QueuedRequest, TokenEvent]]) -> None:
        for queued, event in events:
            queued.events.put_nowait(event)
            if event.finish is not None and queued in self._unfinished:
                self._unfinished[queued] -= 1
                if not self._unfinished[queued]:
                    del self._unfinished[queued]
                    self._undelivered[queued] = queued.sample_count
        # A client that does not receive its response must neither block others nor fill the memory.
        while sum(self._undelivered.values()) > self._room:
            slowest = next(iter(self._undelivered))
            del self._undelivered[slowest]
            slowest.disconnect()

    # Called from any thread and from signal handlers: a SimpleQueue is reentrant

    def stop(self) -> None:
        """Accepts no new requests and lets the present ones finish. The second call ends them at once."""
        self._stopped = self._stopped or time.monotonic()
        self.stop_count += 1
        self._inbox.put(None)

    @property
    def seconds_left(self) -> float:
        """Seconds until all requests must end, after the first stop."""
        return max(self._stopped + self._stop_seconds - time.monotonic(), 0.0) if self.stop_count == 1 else 0.0

    def note_server_end(self) -> None:
        """Notes that the server has ended."""
        self._lost = True
        self._inbox.put(None)

    # The engine's side: called in the thread that owns the engine

    def pop_requests(self, *, wait: bool) -> list[QueuedRequest]:
        """The new requests. With `wait`, blocks until there is one or the queue is stopped."""
        if wait and self._lost:
            raise RuntimeError("the HTTP server has ended by itself")
        found: list[QueuedRequest | None] = []
        try:
            while True:
                found.append(self._inbox.get(block=wait and not found))
        except Empty:
            return [queued for queued in found if queued is not None and not queued.is_over]

    def publish(self, events: Sequence[tuple[QueuedRequest, TokenEvent]]) -> None:
        """Sends the events of an engine step to the event loop."""
        if events:
            self.call_in_event_loop(self._deliver, events)

    def call_in_event_loop(self, function: Callable[..., None], *arguments: object) -> None:
        """Calls a function in the event loop, unless the server has ended."""
        if not self._lost:
            assert self.loop is not None
            self.loop.call_soon_threadsafe(function, *arguments)
