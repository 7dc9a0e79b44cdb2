"""Scores completions in worker processes, each under a time limit.

A scorer is code that nobody here has read, run on text that a model wrote. So each completion is scored in a process of its own kind: one that
hangs is killed, one that dies is replaced, and what raises or returns no finite number is counted. Each costs its sample (reward 0), never the run.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import pickle
import signal
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Literal

from ebbtide.config.tree import Task as TaskConfig
from ebbtide.errors import UserError
from ebbtide.progress import Progress
from ebbtide.tasks.build import build_task
from ebbtide.tasks.task import Problem, Task

Failure = Literal["timeout", "crash", "error", "not_finite"]
START_TRIES = 3
START_SECONDS = 120.0  # a worker imports the task's packages; on a loaded machine that takes many times its usual second


@dataclass(frozen=True)
class Scored:
    """A completion's reward; `failure` says why it is 0 where its scorer did not give one."""

    value: float
    parts: dict[str, float] = field(default_factory=dict)
    failure: Failure | None = None
    message: str = ""


def score_one(task: Task, problem: Problem, completion: str) -> Scored:
    """Scores in this process; whatever the scorer raises becomes a failure of this sample."""
    try:
        score = task.score(problem, completion)
        value, parts = float(score.value), {str(name): float(part) for name, part in score.parts.items()}
    except Exception as error:  # noqa: BLE001 (a scorer is foreign code: what it raises is a fact about this sample, kept and counted)
        return Scored(0.0, failure="error", message=f"{type(error).__name__}: {error}")
    if not math.isfinite(value) or not all(math.isfinite(part) for part in parts.values()):
        return Scored(0.0, failure="not_finite", message=f"the score is {score}")
    return Scored(value, parts)


def _work(pipe: Connection, config: TaskConfig, seed: int) -> None:
    """A worker's life: build the task, say so, then score until the pipe closes."""
    os.setsid()  # a group of its own: Ctrl-C is the parent's to handle, and what a scorer starts can be ended with it
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)  # a scorer's prints are not the run's output
    task, mine = build_task(config, seed, evaluated=False), os.getpid()
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the parent is gone, or wants no more
        pipe.send("ready")
        while True:
            index, item = pipe.recv()
            scored = score_one(task, *pickle.loads(item))  # noqa: S301 (from the parent alone)
            if os.getpid() != mine:
                os._exit(1)  # a scorer forked, and this is the child: the answer is not its to give
            pipe.send((index, scored))


class _Worker:
    """One process, the completion it works on, and when that must be done."""

    def __init__(self, config: TaskConfig, seed: int) -> None:
        context = multiprocessing.get_context("spawn")  # a fork of a process with CUDA or threads in it is not safe
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, config, seed), name="ebbtide-scorer")
        # Born deaf to Ctrl-C: until it has a group of its own, the terminal sends it what is meant for the parent.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        self.ready = False
        self.item: int | None = None
        self.deadline = time.monotonic() + START_SECONDS

    def stop(self) -> None:
        self.pipe.close()
        with suppress(ProcessLookupError, PermissionError):  # it is gone already, or died before it had its group
            os.killpg(self.process.pid or 0, signal.SIGKILL)
        self.process.kill()
        self.process.join()


class ScoringPool:
    """Worker processes that score completions; use as a context manager."""

    def __init__(self, config: TaskConfig, seed: int) -> None:
        self._config, self._seed = config, seed
        self._failed_starts = 0
        self._workers = [_Worker(config, seed) for _ in range(config.scoring.workers)]

    def __enter__(self) -> ScoringPool:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.stop()

    def score(self, work: Sequence[tuple[Problem, str]], progress: Progress = lambda done, of: None) -> list[Scored]:
        """One Scored for each (problem, completion), in order."""
        results: list[Scored | None] = [None] * len(work)
        waiting: deque[tuple[int, bytes]] = deque()
        for index, item in enumerate(work):
            try:
                waiting.append((index, pickle.dumps(item)))
            except (pickle.PicklingError, TypeError, AttributeError) as error:
                results[index] = Scored(0.0, failure="error", message=f"the problem cannot be sent to a scoring process: {error}")
        while None in results:
            for worker in self._workers:
                if worker.ready and worker.item is None and waiting:
                    self._hand_out(worker, *waiting.popleft())
            for worker in self._due():
                answer = self._collect(worker)
                if answer is not None:
                    results[answer[0]] = answer[1]
                    progress(len(work) - results.count(None), len(work))
        return [result for result in results if result is not None]

    def _hand_out(self, worker: _Worker, index: int, item: bytes) -> None:
        worker.item = index
        worker.deadline = time.monotonic() + self._config.scoring.seconds
        # A worker that died between two completions: `_collect` finds its pipe at the end and replaces it.
        with suppress(BrokenPipeError, ConnectionResetError):
            worker.pipe.send((index, item))

    def _due(self) -> list[_Worker]:
        """Waits until a worker has answered, died or run out of time."""
        busy = [worker for worker in self._workers if worker.item is not None or not worker.ready]
        soonest = min(worker.deadline for worker in busy)
        answered = wait([worker.pipe for worker in busy], timeout=max(0.0, soonest - time.monotonic()))
        now = time.monotonic()
        return [worker for worker in busy if worker.pipe in answered or worker.deadline <= now]

    def _collect(self, worker: _Worker) -> tuple[int, Scored] | None:
        """What a due worker has to say of its completion; None if it has none yet."""
        said: Scored | None = None
        try:
            if worker.pipe.poll():
                answer = worker.pipe.recv()
                if answer == "ready":
                    worker.ready, self._failed_starts = True, 0
                    return None
                said = (
                    answer[1] if answer[0] == worker.item else Scored(0.0, failure="crash", message="the scorer's process answered twice")
                )
        except (EOFError, ConnectionResetError):
            said = Scored(0.0, failure="crash", message="the scorer's process died")
        if not worker.ready:
            self._start_again(worker)
            return None
        if said is None:
            said = Scored(0.0, failure="timeout", message=f"no score within {self._config.scoring.seconds:g} s (`task.scoring.seconds`)")
        index, worker.item = worker.item, None
        if said.failure in ("timeout", "crash"):
            self._replace(worker)
        assert index is not None  # a ready worker that is due has a completion
        return index, said

    def _start_again(self, worker: _Worker) -> None:
        """A worker that could not build the task. Once is bad luck; as often as there are tries, with none ready, is the task."""
        self._failed_starts += 1
        if self._failed_starts >= START_TRIES and not any(other.ready for other in self._workers):
            raise UserError("the scoring processes could not build the task; their error stands above")
        self._replace(worker)

    def _replace(self, worker: _Worker) -> None:
        worker.stop()
        self._workers[self._workers.index(worker)] = _Worker(self._config, self._seed)
