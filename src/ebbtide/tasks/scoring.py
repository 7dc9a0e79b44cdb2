"""Scores completions in separate processes, each under a time limit.

A scorer is foreign code, run on text that a model wrote. So a process that hangs is killed, one that dies is replaced,
and a scorer that raises or gives no valid reward is counted. Only that sample is lost (reward 0); the run continues.
"""

from __future__ import annotations

import select
import time
from collections import deque
from collections.abc import Sequence

from ebbtide.config.task import TaskConfig
from ebbtide.errors import UserError
from ebbtide.progress import Progress
from ebbtide.tasks.channel import BrokenProcess
from ebbtide.tasks.score_message import ScoreResult, failed_score
from ebbtide.tasks.scoring_process import ScoringProcess
from ebbtide.tasks.task import Problem

START_TRIES = 3
START_SECONDS = 120.0  # A process imports the task's packages: one second, but far more on a loaded machine.
LONGEST_WAIT = 3600.0  # Seconds; `poll` does not accept unbounded numbers.
MOST_AT_ONCE = 8  # Completions that a process is sent at once, if there are many: a message takes longer than a check.


class _Worker:
    """One scoring process, the completions that it was sent, and the deadline for the first of them."""

    def __init__(self, config: TaskConfig, seed: int) -> None:
        self.process = ScoringProcess()
        self.ready = False
        self.items: deque[int] = deque()
        self.ticket = 0  # Of the last completion that it was sent.
        self.deadline = time.monotonic() + START_SECONDS
        self.process.send((config, seed))

    @property
    def idle(self) -> bool:
        return self.ready and not self.items

    @property
    def late(self) -> bool:
        return not self.idle and self.deadline <= time.monotonic()

    def awaits(self, ticket: float) -> bool:
        """Whether a result with this ticket is the next one, and nothing was sent after the last one."""
        left = len(self.items)
        return left > 0 and ticket == self.ticket - left + 1 and (left > 1 or not self.process.has_extra_output)

    def send(self, items: Sequence[int], work: Sequence[tuple[Problem, str]], seconds: float) -> None:
        """Sends completions to be scored, each within so many seconds."""
        first = self.ticket + 1
        self.process.send([(first + place, *work[item]) for place, item in enumerate(items)])
        self.ticket += len(items)
        self.items, self.deadline = deque(items), time.monotonic() + seconds


class ScoringPool:
    """A pool of scoring processes; use it as a context manager."""

    def __init__(self, config: TaskConfig, seed: int) -> None:
        self._config, self._seed = config, seed
        self._failed_starts = 0
        self._workers = [_Worker(config, seed) for _ in range(config.scoring.workers)]

    def __enter__(self) -> ScoringPool:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:  # All channels are closed first, then each process is waited for.
            worker.process.close()
        for worker in self._workers:
            worker.process.stop()

    def score(
        self, work: Sequence[tuple[Problem, str]], progress: Progress = lambda done, of: None
    ) -> list[ScoreResult]:
        """The result of each (problem, completion), in order."""
        results: dict[int, ScoreResult] = {}
        waiting = deque(range(len(work)))

        def record(item: int, scored: ScoreResult) -> None:
            results[item] = scored
            progress(len(results), len(work))

        limit = max(1, min(MOST_AT_ONCE, len(work) // (4 * len(self._workers))))
        while len(results) < len(work):
            for worker in [worker for worker in self._workers if worker.idle and waiting]:
                self._collect(worker)  # A process that died since its last result is replaced, and no sample is lost.
            for worker in self._workers:
                while worker.idle and waiting:
                    items = [waiting.popleft() for _ in range(min(limit, len(waiting)))]
                    try:
                        worker.send(items, work, self._config.scoring.timeout_s)
                    except Exception as error:  # noqa: BLE001 (foreign code defines how a problem is pickled)
                        if len(items) > 1:  # It is one of them. Each is sent by itself from here on.
                            waiting.extendleft(reversed(items))
                            limit = 1
                            continue
                        message = f"the problem cannot be sent to a scoring process: {error}"
                        record(items[0], failed_score("error", message))
            for worker in self._due():
                sent = worker.items.copy()
                while (scored := self._collect(worker)) is not None and sent:
                    record(sent.popleft(), scored)
                    if worker not in self._workers:  # It was replaced: others score what it was also sent.
                        waiting.extendleft(reversed(sent))
                        break
        return [results[item] for item in range(len(work))]

    def _due(self) -> list[_Worker]:
        """Waits until a process sends something, can receive more, has died or has exceeded its time limit."""
        deadlines = [worker.deadline for worker in self._workers if not worker.idle]
        if not deadlines:
            return []
        poll = select.poll()
        for worker in self._workers:
            poll.register(worker.process.fileno(), worker.process.poll_events)
        left = max(0.0, min(deadlines) - time.monotonic())
        ready = {channel for channel, _ in poll.poll(1000 * min(LONGEST_WAIT, left))}
        return [worker for worker in self._workers if worker.process.fileno() in ready or worker.late]

    def _collect(self, worker: _Worker) -> ScoreResult | None:
        """The result of a due worker's next completion; None if there is none yet. A worker that fails is
        replaced."""
        try:
            match worker.process.receive():
                case ("ready",) if not worker.ready:
                    worker.ready, self._failed_starts = True, 0
                    return None
                case ("unbuilt", why) if not worker.ready:
                    raise BrokenProcess(why)
                case ("scored", ticket, scored) if worker.awaits(ticket):
                    worker.items.popleft()
                    worker.deadline = time.monotonic() + self._config.scoring.timeout_s
                    return scored
                case None if not worker.late:
                    return None
                case None:
                    limit = f"{self._config.scoring.timeout_s:g} s (`task.scoring.timeout_s`)"
                    outcome = failed_score(
                        "timeout", f"no answer within {limit if worker.ready else f'{START_SECONDS:g} s'}"
                    )
                case _:
                    raise BrokenProcess("the scorer's process sent an unexpected message")
        except BrokenProcess as error:
            outcome = failed_score("crash", str(error))
        if not worker.ready:
            self._count_failed_start(outcome.message)
        worker.process.stop()
        self._workers[self._workers.index(worker)] = _Worker(self._config, self._seed)
        return outcome

    def _count_failed_start(self, why: str) -> None:
        """Gives up after several failed starts with no process ready: then the task is at fault, not bad luck."""
        self._failed_starts += 1
        if self._failed_starts >= START_TRIES and not any(worker.ready for worker in self._workers):
            raise UserError(f"the scoring processes could not build the task: {why}")
