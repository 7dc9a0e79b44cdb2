"""The user's own task or reward function as a Python object: imports it, and checks a task's problems before anything
else is loaded."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from ebbtide.config.rewards import PythonTaskConfig
from ebbtide.config.task import FileTaskConfig
from ebbtide.errors import UserError
from ebbtide.tasks.reward_functions import RewardFunctionTask, reward_function_kind
from ebbtide.tasks.task import Problem, Problems, Score, Task, find_message_problem

NAMES = {"trl": "TRL", "verl": "verl"}


def load_python_task(config: PythonTaskConfig) -> Task:
    """The task object that a config names, or the one that it returns when it is called."""
    found = _import_object(config)
    if (kind := reward_function_kind(found)) is not None:
        raise UserError(
            f"`task.python.object: {config.object}` is a reward function as {NAMES[kind]} has it, and has no problems:"
            " name those that it scores in `task.file`"
        )
    if isinstance(found, type) or not _is_task(found):
        if not callable(found):
            raise UserError(
                f"`task.python.object: {config.object}` is a {type(found).__name__}: it needs the methods `problems`"
                " and `score`"
            )
        found = _call(found, config)
    elif config.options:
        raise UserError(
            f"`task.python.options` are for a class or function, but `{config.object}` is already a task: remove them"
        )
    if not _is_task(found):
        raise UserError(
            f"`task.python.object: {config.object}` returned a {type(found).__name__}: it needs the methods `problems`"
            " and `score`"
        )
    return _CheckedTask(found, f"`task.python.object: {config.object}`")


def load_reward_function_task(
    python: PythonTaskConfig, file: FileTaskConfig, *, held_out: int, key: str = "task.python"
) -> RewardFunctionTask:
    """The rows of a file, scored by the reward function that a config names, under this key."""
    found, options = _import_object(python, key), python.options
    if isinstance(found, type):  # a class whose objects can be called
        found, options = _call(found, python, key), {}
    if reward_function_kind(found) is None:
        raise UserError(
            f"`{key}.object: {python.object}` is not a reward function for the rows of `task.file`: it has"
            " neither a parameter `completions`, as TRL's have, nor `solution_str`, as verl's have. A task with"
            " problems of its own needs no `task.file`: set `task.file=null`"
        )
    return RewardFunctionTask(file, found, options, held_out=held_out, key=key)


def _import_object(config: PythonTaskConfig, key: str = "task.python") -> Any:
    """The object that a config names."""
    module_name, colon, name = config.object.rpartition(":")
    if not colon or not module_name or not name:
        raise UserError(f"`{key}.object` is `{config.object}` and should be `module:name`, or `file.py:name`")
    try:
        return getattr(_import_module(module_name), name)
    except SystemExit as error:
        raise UserError(
            f"`{key}.object: {config.object}` exits the process when it is imported (exit code {error.code}):"
            " remove that from the module"
        ) from None
    except (ImportError, AttributeError, TypeError, OSError) as error:  # TypeError: for a name that begins with a dot.
        raise UserError(
            f"`{key}.object: {config.object}` cannot be imported (from {os.getcwd()} or the installed packages):"
            f" {error}"
        ) from None


def _import_module(name: str) -> ModuleType:
    """A module by its name, or that of a file of Python."""
    if not name.endswith(".py"):
        return importlib.import_module(name)
    file = Path(name).expanduser().resolve()
    known = re.sub(r"\W", "_", str(file))
    if known in sys.modules:
        return sys.modules[known]
    spec = importlib.util.spec_from_file_location(known, file)
    assert spec is not None  # Its name ends in `.py`.
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[known] = module  # Its dataclasses look for it there.
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[known]
        raise
    return module


def _call(found: Callable[..., Any], config: PythonTaskConfig, key: str = "task.python") -> Any:
    try:
        return found(**config.options)
    except TypeError as error:
        raise UserError(f"`{key}.object: {config.object}` could not be called with `{key}.options`: {error}") from None


def _is_task(found: object) -> bool:
    return callable(getattr(found, "problems", None)) and callable(getattr(found, "score", None))


class _CheckedTask:
    """A task whose problems are checked."""

    def __init__(self, task: Task, called: str) -> None:
        self._task, self._called = task, called

    def problems(self) -> Problems:
        found = self._task.problems()
        if not isinstance(found, Problems):
            raise self._wrong(
                f"returns a {type(found).__name__} as its problems: return `Problems(train=[...], held_out=[...])`"
            )
        for name in ("train", "held_out"):
            some = getattr(found, name)
            if not isinstance(some, Sequence) or isinstance(some, str):
                raise self._wrong(
                    f"has a {type(some).__name__} as `Problems.{name}`: make it a list, which may be empty"
                )
            for number, problem in enumerate(some):
                self._check(problem, f"problem {number} of `{name}`")
        return found

    def _check(self, problem: object, which: str) -> None:
        if not isinstance(problem, Problem):
            raise self._wrong(f"has a {type(problem).__name__} as {which}: make it a `Problem(messages, answer)`")
        if (why := find_message_problem(problem.messages)) is not None:
            raise self._wrong(f"has {which} with messages that {why}: `ask(text)` makes a list with one message")

    def _wrong(self, what: str) -> UserError:
        return UserError(f"{self._called} {what}")

    def score(self, problem: Problem, completion: str) -> Score:
        return self._task.score(problem, completion)
