"""Scores completions in processes of their own, each under a time limit.

A scorer is code that nobody here has read, run on text that a model wrote. So one that hangs is ended, one that dies is
replaced, and what raises or gives no reward to train on is counted. Each costs its sample (reward 0), never the run.
"""

from __future__ import annotations

import selectors
import time
from collections import deque
from collections.abc import Sequence

from ebbtide.config.tree import Task as TaskConfig
from ebbtide.errors import UserError
from ebbtide.progress import Progress
from ebbtide.tasks.answer import Scored, failed
from ebbtide.tasks.process import Broken, ScoringProcess
from ebbtide.tasks.task import Problem

START_TRIES = 3
START_SECONDS = 120.0  # a process imports the task's packages; on a loaded machine that takes far more than its second
LONGEST_WAIT = 3600.0  # seconds; a selector takes no number without bounds


class _Worker:
    """One scoring process, the completion it works on, and when that must be done."""

    def __init__(self, config: TaskConfig, seed: int) -> None:
        self.process = ScoringProcess()
        self.ready = False
        self.item: int | None = None
        self.ticket = 0
        self.deadline = time.monotonic() + START_SECONDS
        self.process.ask((config, seed))

    @property
    def idle(self) -> bool:
        return self.ready and self.item is None

    @property
    def late(self) -> bool:
        return not self.idle and self.deadline <= time.monotonic()

    def awaits(self, ticket: float) -> bool:
        """This answer, and nothing after it."""
        return self.item is not None and ticket == self.ticket and not self.process.chatters

    def hand(self, item: int, problem: Problem, completion: str, seconds: float) -> None:
        self.process.ask((self.ticket + 1, problem, completion))
        self.ticket, self.item, self.deadline = self.ticket + 1, item, time.monotonic() + seconds


class ScoringPool:
    """Processes that score completions; use as a context manager."""

    def __init__(self, config: TaskConfig, seed: int) -> None:
        self._config, self._seed = config, seed
        self._failed_starts = 0
        self._workers = [_Worker(config, seed) for _ in range(config.scoring.workers)]

    def __enter__(self) -> ScoringPool:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:  # all of them at once, then one after the other
            worker.process.let_go()
        for worker in self._workers:
            worker.process.stop()

    def score(self, work: Sequence[tuple[Problem, str]], progress: Progress = lambda done, of: None) -> list[Scored]:
        """One Scored for each (problem, completion), in order."""
        results: dict[int, Scored] = {}
        waiting = deque(range(len(work)))

        def note(item: int | None, scored: Scored | None) -> None:
            if item is not None and scored is not None:
                results[item] = scored
                progress(len(results), len(work))

        while len(results) < len(work):
            for worker in [worker for worker in self._workers if worker.idle]:
                self._collect(worker)  # one that has died since its last answer is replaced, and costs no sample
            for worker in self._workers:
                while worker.idle and waiting:
                    item = waiting.popleft()
                    try:
                        worker.hand(item, *work[item], self._config.scoring.seconds)
                    except Exception as error:  # noqa: BLE001 (foreign code says how a problem is pickled)
                        note(item, failed("error", f"the problem cannot be sent to a scoring process: {error}"))
            for worker in self._due():
                note(worker.item, self._collect(worker))
        return [results[item] for item in range(len(work))]

    def _due(self) -> list[_Worker]:
        """Waits until a process says something, can be sent more, has died or has run out of time."""
        deadlines = [worker.deadline for worker in self._workers if not worker.idle]
        if not deadlines:
            return []
        with selectors.DefaultSelector() as selector:
            for worker in self._workers:
                selector.register(worker.process, worker.process.awaited, worker)
            left = max(0.0, min(deadlines) - time.monotonic())
            heard = [key.data for key, _ in selector.select(min(LONGEST_WAIT, left))]
        return [worker for worker in self._workers if worker in heard or worker.late]

    def _collect(self, worker: _Worker) -> Scored | None:
        """What becomes of a due worker's completion; None where that is not known yet. One that fails is replaced."""
        try:
            match worker.process.hear():
                case ("ready",) if not worker.ready:
                    worker.ready, self._failed_starts = True, 0
                    return None
                case ("unbuilt", why) if not worker.ready:
                    raise Broken(why)
                case ("scored", ticket, scored) if worker.awaits(ticket):
                    worker.item = None
                    return scored
                case None if not worker.late:
                    return None
                case None:
                    limit = f"{self._config.scoring.seconds:g} s (`task.scoring.seconds`)"
                    outcome = failed("timeout", f"no answer within {limit if worker.ready else f'{START_SECONDS:g} s'}")
                case _:
                    raise Broken("the scorer's process said what it was not asked")
        except Broken as error:
            outcome = failed("crash", str(error))
        if not worker.ready:
            self._count_failed_start(outcome.message)
        worker.process.stop()
        self._workers[self._workers.index(worker)] = _Worker(self._config, self._seed)
        return outcome

    def _count_failed_start(self, why: str) -> None:
        """Once is bad luck; as often as there are tries, with none ready, is the task."""
        self._failed_starts += 1
        if self._failed_starts >= START_TRIES and not any(worker.ready for worker in self._workers):
            raise UserError(f"the scoring processes could not build the task: {why}")
