"""The loop of the engine thread: requests from the queue become samples of a session, and their tokens go back."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ebbtide.rollout.paged.engine import PagedEngine
from ebbtide.rollout.paged.session import SampleState, Session
from ebbtide.rollout.serve.queue import QueuedRequest, RequestQueue, TokenEvent

# The most samples that wait inside the session, where each holds a number per token; those in the queue cost less.
AHEAD = 64


class EngineLoop:
    """The requests of one session."""

    def __init__(self, queue: RequestQueue, session: Session) -> None:
        self._queue, self._session = queue, session
        self._waiting: deque[QueuedRequest] = deque()
        self._running: dict[SampleState, tuple[QueuedRequest, int]] = {}  # with the index of the sample in its request

    @property
    def is_idle(self) -> bool:
        return not self._waiting and not self._running

    def add(self, requests: Sequence[QueuedRequest]) -> None:
        self._waiting += requests

    def step(self) -> None:
        """Cancels what nobody waits for any more, starts what fits, and does one forward pass."""
        for sample in [sample for sample, (queued, _) in self._running.items() if queued.is_over]:
            self._session.cancel(sample)
            del self._running[sample]
        self._waiting = deque(queued for queued in self._waiting if not queued.is_over)
        while self._waiting and self._session.num_waiting < AHEAD:
            self._begin(self._waiting.popleft())
        if self._running:
            self._queue.publish([self._event(sample) for sample in self._session.step()])

    def _begin(self, queued: QueuedRequest) -> None:
        samples = [one for request in list(queued.requests) for one in self._session.add(request, queued.sampling)]
        self._running |= {one: (queued, index) for index, one in enumerate(samples)}

    def _event(self, sample: SampleState) -> tuple[QueuedRequest, TokenEvent]:
        queued, index = self._running[sample]
        if sample.finish is not None:
            del self._running[sample]
        return queued, TokenEvent(index, sample.tokens[-1:], sample.plain_logprobs[-1:], sample.finish)


def run_engine_loop(queue: RequestQueue, session: Session) -> None:
    """Runs until the queue is stopped and the accepted requests are done or out of time."""
    loop = EngineLoop(queue, session)
    while True:
        loop.add(queue.pop_requests(wait=loop.is_idle and not queue.stop_count))
        if queue.stop_count and (loop.is_idle or not queue.seconds_left):
            return
        loop.step()


def serve_waiting(queue: RequestQueue, engine: PagedEngine) -> None:
    """Serves the requests that wait now, and none that arrive later."""
    waiting = queue.pop_requests(wait=False)
    requests = [(request, queued.sampling.max_new_tokens) for queued in waiting for request in list(queued.requests)]
    if not requests:
        return
    prompts = [(len(request.prompt), len(request.seeds)) for request, _ in requests]
    with engine.session(prompts, max(new for _, new in requests)) as session:
        loop = EngineLoop(queue, session)
        loop.add(waiting)
        while not loop.is_idle:
            loop.step()
