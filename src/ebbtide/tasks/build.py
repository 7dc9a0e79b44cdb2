"""The task that a config names."""

from __future__ import annotations

import re

from ebbtide.config.tree import Task as TaskConfig
from ebbtide.errors import UserError
from ebbtide.tasks.builtin import build_builtin
from ebbtide.tasks.files import Files
from ebbtide.tasks.gym import Gym
from ebbtide.tasks.python_task import python_task
from ebbtide.tasks.task import Problem, Problems, Score, Task

DEFAULT_SIZE = 1000
EXTRACTED = "extracted"  # the part of a score that says whether `task.extract` matched


def build_task(config: TaskConfig, seed: int, evaluated: bool = True) -> Task:
    """The configured task, with the system message and the extraction of answers laid around it. Held-out problems are set aside if `evaluated`."""
    return _Framed(_source(config, seed, config.held_out if evaluated else 0), config)


def _source(config: TaskConfig, seed: int, held_out: int) -> Task:
    size = config.size or DEFAULT_SIZE
    if config.builtin is not None:
        return build_builtin(config.builtin.name, config.builtin.options, size=size, held_out=held_out, seed=seed)
    if config.gym is not None:
        return Gym(config.gym.dataset, config.gym.options, size=size, held_out=held_out, seed=seed)
    if config.file is not None:
        return Files(config.file, held_out=held_out)
    assert config.python is not None  # the config holds exactly one of the four
    return python_task(config.python)


class _Framed:
    """A task with a system message before its problems, and only the extracted answer of a completion scored."""

    def __init__(self, task: Task, config: TaskConfig) -> None:
        self._task, self._system, self._size, extract = task, config.system, config.size, config.extract
        try:
            self._extract = re.compile(extract, re.DOTALL) if extract is not None else None
        except re.error as error:
            raise UserError(f"`task.extract: {extract}` is not a regular expression: {error}") from None
        if self._extract is not None and self._extract.groups != 1:
            raise UserError(f"`task.extract: {extract}` must have exactly one group, around the answer; it has {self._extract.groups}")

    def problems(self) -> Problems:
        found = self._task.problems()
        if not found.train:
            raise UserError("the task has no problems to train on")
        return Problems(
            [self._framed(problem) for problem in found.train[: self._size]], [self._framed(problem) for problem in found.held_out]
        )

    def _framed(self, problem: Problem) -> Problem:
        if self._system is None:
            return problem
        system, rest = self._system, problem.messages
        if rest and rest[0]["role"] == "system":  # a template takes one system message
            system, rest = f"{system}\n\n{rest[0]['content']}", rest[1:]
        return Problem([{"role": "system", "content": system}, *rest], problem.answer, problem.metadata)

    def score(self, problem: Problem, completion: str) -> Score:
        if self._extract is None:
            return self._task.score(problem, completion)
        answers = [answer for answer in self._extract.findall(completion) if answer]  # `(.*)` ends every text with an empty one
        if not answers:
            return Score(0.0, {EXTRACTED: 0.0})
        score = self._task.score(problem, answers[-1])
        return Score(score.value, {**score.parts, EXTRACTED: 1.0})
