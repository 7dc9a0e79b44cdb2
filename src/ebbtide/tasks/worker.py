"""A scoring process: it builds the task and scores one completion after the other, until the run is over."""

from __future__ import annotations

import os
import pickle
import socket
import traceback
from numbers import Real
from typing import Any, BinaryIO

from ebbtide.errors import UserError
from ebbtide.printable import cut
from ebbtide.tasks.answer import MOST_MESSAGE, Scored, failed, judged, line, scored_line
from ebbtide.tasks.build import build_task
from ebbtide.tasks.task import Problem, Score, Task

LENGTH = 8  # bytes before a request, which say how long it is


def request(of: Any) -> bytes:
    """For `work`, in the run's own process: what is pickled there is the run's own."""
    made = pickle.dumps(of)
    return len(made).to_bytes(LENGTH, "big") + made


def work(channel: int) -> None:
    """A scoring process's life: it builds the task, says so, then scores for as long as it is asked to."""
    with socket.socket(fileno=channel) as run, run.makefile("rb") as asked:
        config, seed = _next(asked)
        try:
            task = build_task(config, seed, evaluated=False)
        except Exception as error:  # noqa: BLE001 (foreign code: the run says what it raised)
            why = str(error) if isinstance(error, UserError) else traceback.format_exc()
            run.sendall(line("unbuilt", cut(why, MOST_MESSAGE)))
            return
        mine = os.getpid()
        run.sendall(line("ready"))
        while True:
            ticket, problem, completion = _next(asked)
            scored = score_one(task, problem, completion)
            if os.getpid() != mine:
                os._exit(1)  # a scorer forked, and this is the child: the answer is not its to give
            run.sendall(scored_line(ticket, scored))


def score_one(task: Task, problem: Problem, completion: str) -> Scored:
    """Whatever the scorer raises becomes a failure of this sample."""
    try:
        score = task.score(problem, completion)
        if isinstance(score, Real):  # as a function that gives a reward would
            score = Score(float(score))
        if not (hasattr(score, "value") and hasattr(score, "parts")):
            return failed("error", f"`score` returned {type(score).__name__}: return a number, or Score(value, parts)")
        value, parts = float(score.value), {str(name): float(part) for name, part in score.parts.items()}
    except Exception as error:  # noqa: BLE001 (foreign code: what it raises is a fact about this sample)
        return failed("error", f"{type(error).__name__}: {error}")
    return judged(value, parts)


def _next(asked: BinaryIO) -> Any:
    size = asked.read(LENGTH)
    if len(size) < LENGTH:
        raise EOFError("the run is over")
    return pickle.loads(asked.read(int.from_bytes(size, "big")))  # noqa: S301 (from the run alone)
