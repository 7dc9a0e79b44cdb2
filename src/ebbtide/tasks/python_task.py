"""A task of the user's own, as a Python object: found, and its problems looked at before anything is loaded for them."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from typing import Any

from ebbtide.config.tree import PythonTask
from ebbtide.errors import UserError
from ebbtide.tasks.task import Problem, Problems, Score, Task, why_no_messages


def python_task(config: PythonTask) -> Task:
    """The object that a config names, or what it gives when it is called."""
    module_name, colon, name = config.object.partition(":")
    if not colon or not module_name or not name:
        raise UserError(f"`task.python.object` is `{config.object}` and should be `module:name`")
    try:
        found: Any = getattr(importlib.import_module(module_name), name)
    except SystemExit as error:
        raise UserError(f"`task.python.object: {config.object}` ends the process as it is imported (exit code {error.code})") from None
    except (ImportError, AttributeError, TypeError) as error:  # TypeError: of a name that begins with a dot
        raise UserError(
            f"`task.python.object: {config.object}` cannot be imported (from {os.getcwd()} or what is installed): {error}"
        ) from None
    if isinstance(found, type) or not _is_task(found):
        if not callable(found):
            raise UserError(f"`task.python.object: {config.object}` is {type(found).__name__}: it needs the methods `problems` and `score`")
        try:
            found = found(**config.options)
        except TypeError as error:
            raise UserError(f"`task.python.object: {config.object}` could not be called with `task.python.options`: {error}") from None
    elif config.options:
        raise UserError(f"`task.python.options` are for a class or function, and `{config.object}` is a ready task: remove them")
    if not _is_task(found):
        raise UserError(f"`task.python.object: {config.object}` gave {type(found).__name__}: it needs the methods `problems` and `score`")
    return _Checked(found, f"`task.python.object: {config.object}`")


def _is_task(found: object) -> bool:
    return callable(getattr(found, "problems", None)) and callable(getattr(found, "score", None))


class _Checked:
    """A task whose problems are what they should be."""

    def __init__(self, task: Task, called: str) -> None:
        self._task, self._called = task, called

    def problems(self) -> Problems:
        found = self._task.problems()
        if not isinstance(found, Problems):
            raise self._wrong(f"gives {type(found).__name__} as its problems: return `Problems(train=[...], held_out=[...])`")
        for name in ("train", "held_out"):
            some = getattr(found, name)
            if not isinstance(some, Sequence) or isinstance(some, str):
                raise self._wrong(f"gives {type(some).__name__} as `Problems.{name}`: make it a list, which may be empty")
            for number, problem in enumerate(some):
                self._check(problem, f"problem {number} of `{name}`")
        return found

    def _check(self, problem: object, which: str) -> None:
        if not isinstance(problem, Problem):
            raise self._wrong(f"gives {type(problem).__name__} as {which}: make it a `Problem(messages, answer)`")
        if (why := why_no_messages(problem.messages)) is not None:
            raise self._wrong(f"has {which} with messages that {why}: `ask(text)` makes a list with one message")

    def _wrong(self, what: str) -> UserError:
        return UserError(f"{self._called} {what}")

    def score(self, problem: Problem, completion: str) -> Score:
        return self._task.score(problem, completion)
