"""The engine's thread at work: jobs from the desk become samples of a session, and their tokens go back."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ebbtide.rollout.paged.engine import PagedEngine, Session, Told
from ebbtide.rollout.serve.desk import Desk, Job, Piece

AHEAD = 64  # samples that wait in the session itself, with a number for each of their tokens; the rest of the queue costs less


class Shift:
    """The jobs of one session."""

    def __init__(self, desk: Desk, session: Session) -> None:
        self._desk, self._session = desk, session
        self._waiting: deque[Job] = deque()
        self._running: dict[Told, tuple[Job, int]] = {}  # with the sample's number in its job

    @property
    def idle(self) -> bool:
        return not self._waiting and not self._running

    def add(self, jobs: Sequence[Job]) -> None:
        self._waiting += jobs

    def step(self) -> None:
        """One pass through the model, after those left that nobody waits for."""
        for told in [told for told, (job, _) in self._running.items() if job.over]:
            self._session.cancel(told)
            del self._running[told]
        self._waiting = deque(job for job in self._waiting if not job.over)
        while self._waiting and self._session.waiting < AHEAD:
            self._begin(self._waiting.popleft())
        if self._running:
            self._desk.tell([self._piece(told) for told in self._session.step()])

    def _begin(self, job: Job) -> None:
        told = [one for request in list(job.requests) for one in self._session.add(request, job.sampling)]
        self._running |= {one: (job, index) for index, one in enumerate(told)}

    def _piece(self, told: Told) -> tuple[Job, Piece]:
        job, index = self._running[told]
        if told.finish is not None:
            del self._running[told]
        return job, Piece(index, told.tokens[-1:], told.plain_logprobs[-1:], told.finish)


def work(desk: Desk, session: Session) -> None:
    """Until the desk is asked to stop, and what was taken is done or its time is up."""
    shift = Shift(desk, session)
    while True:
        shift.add(desk.take(wait=shift.idle and not desk.stops))
        if desk.stops and (shift.idle or not desk.seconds_left):
            return
        shift.step()


def work_off(desk: Desk, engine: PagedEngine) -> None:
    """What waits at the desk now, and nothing that comes later."""
    jobs = desk.take(wait=False)
    requests = [(request, job.sampling.max_new_tokens) for job in jobs for request in list(job.requests)]
    if not requests:
        return
    prompts = [(len(request.prompt), len(request.seeds)) for request, _ in requests]
    with engine.session(prompts, max(new for _, new in requests)) as session:
        shift = Shift(desk, session)
        shift.add(jobs)
        while not shift.idle:
            shift.step()
