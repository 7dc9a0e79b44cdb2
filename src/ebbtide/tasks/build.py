"""Builds the task that a config names."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from ebbtide.config.task import TaskConfig, TaskSourceConfig, reward_key
from ebbtide.errors import UserError
from ebbtide.tasks.builtin import build_builtin
from ebbtide.tasks.environment_task import EnvironmentTask
from ebbtide.tasks.files import FileTask
from ebbtide.tasks.gym import GymTask
from ebbtide.tasks.judgement import check_prompts
from ebbtide.tasks.mixed import MixedTask
from ebbtide.tasks.python_task import load_python_task, load_reward_function_task
from ebbtide.tasks.rewards import EXTRACTED, AnswerScorer, RewardedTask
from ebbtide.tasks.task import Problem, Problems, Score, Task

DEFAULT_SIZE = 1000


def build_task(config: TaskConfig, seed: int, evaluated: bool = True) -> Task:
    """The configured task, wrapped with the system message and the extraction of answers. Held-out problems are set
    aside if `evaluated`."""
    if config.mix is None:
        return _build(config, seed, evaluated)
    tasks = {name: _build(one, seed, evaluated, name) for name, one in config.mix.items()}
    return MixedTask(tasks, [one.weight for one in config.mix.values()])


def _build(config: TaskSourceConfig, seed: int, evaluated: bool, task: str | None = None) -> Task:
    """`task`: its name in `task.mix`, if there is one."""
    source = _source(config, seed, config.held_out if evaluated else 0)
    wrapped = _WrappedTask(source, config)
    if config.rewards is None:
        return wrapped
    functions = {
        name: load_reward_function_task(one.python, config.file, held_out=0, key=f"{reward_key(task, name)}.python")
        for name, one in config.rewards.items()
        if one.python is not None and config.file is not None
    }
    scorers: dict[str, Task] = {name: _WrappedTask(function, config) for name, function in functions.items()}
    for name, one in config.rewards.items():
        if one.scorer is not None:
            scorers[name] = wrapped if one.scorer == "task" else _WrappedTask(AnswerScorer(source, one.scorer), config)
    checks: list[Callable[[Problems], None]] = [function.check for function in functions.values()]
    checks += [
        partial(check_prompts, one.judge, key=f"{reward_key(task, name)}.judge")
        for name, one in config.rewards.items()
        if one.judge is not None
    ]
    return RewardedTask(wrapped, config.rewards, scorers, checks)


def _source(config: TaskSourceConfig, seed: int, held_out: int) -> Task:
    size = config.size or DEFAULT_SIZE
    if config.builtin is not None:
        return build_builtin(config.builtin.name, config.builtin.options, size=size, held_out=held_out, seed=seed)
    if config.gym is not None:
        return GymTask(config.gym, size=size, held_out=held_out, seed=seed)
    if config.file is not None and config.python is not None:
        return load_reward_function_task(config.python, config.file, held_out=held_out)
    if config.file is not None and config.rewards is not None:
        named = {one.scorer for one in config.rewards.values()} - {None}
        checked = [(config.file.scorer or "exact") if name == "task" else str(name) for name in sorted(map(str, named))]
        return FileTask(config.file, held_out=held_out, keeps_rows=True, checked=checked)
    if config.file is not None:
        return FileTask(config.file, held_out=held_out)
    if config.python is not None:
        return load_python_task(config.python)
    return EnvironmentTask(size=size, held_out=held_out, seed=seed)  # The config has an environment.


class _WrappedTask:
    """A task with a system message before its problems, which scores only the extracted answer of a completion."""

    def __init__(self, task: Task, config: TaskSourceConfig) -> None:
        self._task, self._system, extract = task, config.system, config.extract
        self._size = config.size if config.gym is None else None  # It makes as many as it should have.
        try:
            self._extract = re.compile(extract, re.DOTALL) if extract is not None else None
        except re.error as error:
            raise UserError(f"`task.extract: {extract}` is not a regular expression: {error}") from None
        if self._extract is not None and self._extract.groups != 1:
            raise UserError(
                f"`task.extract: {extract}` has {self._extract.groups} groups: write exactly one, around the answer"
            )

    def problems(self) -> Problems:
        found = self._task.problems()
        if not found.train:
            raise UserError(
                "the task has no problems to train on: check `task`, and lower `task.held_out` if it is set"
            )
        return Problems(
            [self._with_system(problem) for problem in found.train[: self._size]],
            [self._with_system(problem) for problem in found.held_out],
        )

    def _with_system(self, problem: Problem) -> Problem:
        if self._system is None:
            return problem
        system, rest = self._system, problem.messages
        if rest and rest[0]["role"] == "system":  # A chat template accepts one system message.
            system, rest = f"{system}\n\n{rest[0]['content']}", rest[1:]
        return replace(problem, messages=[{"role": "system", "content": system}, *rest])

    def score(self, problem: Problem, completion: str) -> Score:
        if self._extract is None:
            return self._task.score(problem, completion)
        # `(.*)` matches an empty text at the end of every completion.
        answers = [answer for answer in self._extract.findall(completion) if answer]
        if not answers:
            return Score(0.0, {EXTRACTED: 0.0})
        score = self._task.score(problem, answers[-1])
        return Score(score.value, {**score.parts, EXTRACTED: 1.0})
