"""Scores completions in separate processes, each under a time limit.

A scorer is foreign code, run on text that a model wrote. So a process that hangs is killed, one that dies is replaced,
and a scorer that raises or gives no valid reward is counted. Only that sample is lost (reward 0); the run continues.
"""

from __future__ import annotations

import selectors
import time
from collections import deque
from collections.abc import Sequence

from ebbtide.config.task import TaskConfig
from ebbtide.errors import UserError
from ebbtide.progress import Progress
from ebbtide.tasks.score_message import ScoreResult, failed_score
from ebbtide.tasks.scoring_process import BrokenProcess, ScoringProcess
from ebbtide.tasks.task import Problem

START_TRIES = 3
START_SECONDS = 120.0  # A process imports the task's packages: one second, but far more on a loaded machine.
LONGEST_WAIT = 3600.0  # Seconds; a selector does not accept unbounded numbers.


class _Worker:
    """One scoring process, the completion that it is scoring, and the deadline for it."""

    def __init__(self, config: TaskConfig, seed: int) -> None:
        self.process = ScoringProcess()
        self.ready = False
        self.item: int | None = None
        self.ticket = 0
        self.deadline = time.monotonic() + START_SECONDS
        self.process.send((config, seed))

    @property
    def idle(self) -> bool:
        return self.ready and self.item is None

    @property
    def late(self) -> bool:
        return not self.idle and self.deadline <= time.monotonic()

    def awaits(self, ticket: float) -> bool:
        """Whether a result with this ticket is expected, and nothing was sent after it."""
        return self.item is not None and ticket == self.ticket and not self.process.has_extra_output

    def send(self, item: int, problem: Problem, completion: str, seconds: float) -> None:
        """Sends a completion to be scored within so many seconds."""
        self.process.send((self.ticket + 1, problem, completion))
        self.ticket, self.item, self.deadline = self.ticket + 1, item, time.monotonic() + seconds


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

        def record(item: int | None, scored: ScoreResult | None) -> None:
            if item is not None and scored is not None:
                results[item] = scored
                progress(len(results), len(work))

        while len(results) < len(work):
            for worker in [worker for worker in self._workers if worker.idle]:
                self._collect(worker)  # A process that died since its last result is replaced, and no sample is lost.
            for worker in self._workers:
                while worker.idle and waiting:
                    item = waiting.popleft()
                    try:
                        worker.send(item, *work[item], self._config.scoring.timeout_s)
                    except Exception as error:  # noqa: BLE001 (foreign code defines how a problem is pickled)
                        record(item, failed_score("error", f"the problem cannot be sent to a scoring process: {error}"))
            for worker in self._due():
                record(worker.item, self._collect(worker))
        return [results[item] for item in range(len(work))]

    def _due(self) -> list[_Worker]:
        """Waits until a process sends something, can receive more, has died or has exceeded its time limit."""
        deadlines = [worker.deadline for worker in self._workers if not worker.idle]
        if not deadlines:
            return []
        with selectors.DefaultSelector() as selector:
            for worker in self._workers:
                selector.register(worker.process, worker.process.selector_events, worker)
            left = max(0.0, min(deadlines) - time.monotonic())
            ready = [key.data for key, _ in selector.select(min(LONGEST_WAIT, left))]
        return [worker for worker in self._workers if worker in ready or worker.late]

    def _collect(self, worker: _Worker) -> ScoreResult | None:
        """The result of a due worker's completion; None if there is none yet. A worker that fails is replaced."""
        try:
            match worker.process.receive():
                case ("ready",) if not worker.ready:
                    worker.ready, self._failed_starts = True, 0
                    return None
                case ("unbuilt", why) if not worker.ready:
                    raise BrokenProcess(why)
                case ("scored", ticket, scored) if worker.awaits(ticket):
                    worker.item = None
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
