"""The scoring process: builds the task and scores one completion after the other until the run is over."""

from __future__ import annotations

import os
import socket
import traceback

from ebbtide.errors import UserError
from ebbtide.system.printable import cut_middle
from ebbtide.tasks.build import build_task
from ebbtide.tasks.channel import read_request
from ebbtide.tasks.judgement import UnreadableAnswerError
from ebbtide.tasks.score_message import (
    MAX_MESSAGE,
    ScoreResult,
    check_score,
    encode_message,
    encode_result,
    failed_score,
)
from ebbtide.tasks.task import Problem, Task, to_score


def score_requests(channel: int) -> None:
    """The main function of a scoring process: builds the task, reports that it is ready, then scores every request."""
    with socket.socket(fileno=channel) as run, run.makefile("rb") as requests:
        config, seed = read_request(requests)
        try:
            task = build_task(config, seed, evaluated=False)
        except Exception as error:  # noqa: BLE001 (foreign code: the run reports what it raised)
            why = str(error) if isinstance(error, UserError) else traceback.format_exc()
            run.sendall(encode_message("unbuilt", cut_middle(why, MAX_MESSAGE)))
            return
        process = os.getpid()
        run.sendall(encode_message("ready"))
        while True:
            for ticket, problem, completion in read_request(requests):
                scored = score_one(task, problem, completion)
                if os.getpid() != process:
                    os._exit(1)  # A scorer forked, and this is the child: only the parent may answer.
                run.sendall(encode_result(ticket, scored))


def score_one(task: Task, problem: Problem, completion: str) -> ScoreResult:
    """The result of one completion; whatever the scorer raises becomes a failure of this sample."""
    try:
        score = to_score(task.score(problem, completion))
    except UnreadableAnswerError as error:
        return failed_score("judge_unreadable", str(error))
    except Exception as error:  # noqa: BLE001 (foreign code: what it raises is a fact about this sample)
        return failed_score("error", f"{type(error).__name__}: {error}")
    return check_score(score.value, score.parts)
