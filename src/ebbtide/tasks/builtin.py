"""The tasks that ship with Ebbtide: small, verifiable, generated from a seed, without downloads."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from typing import Any

from ebbtide.errors import UserError
from ebbtide.tasks.task import Problem, Problems, Score, Task, ask

MAX_DIGITS = 1000


class DigitsTask:
    """Copy or reverse digits: the answer to `4821=` is `4821` or `1284` and nothing else. The reward is the fraction of
    correct positions."""

    def __init__(self, *, size: int, held_out: int, seed: int, reverse: bool, digits: int = 4) -> None:
        if digits > MAX_DIGITS:
            raise UserError(f"`task.builtin.options.digits: {digits}` is too large: set at most {MAX_DIGITS}")
        if size + held_out > 10**digits:
            raise UserError(
                f"{digits} digits give {10**digits} problems, fewer than `task.size` + `task.held_out` ="
                f" {size + held_out}: lower one of them, or raise `task.builtin.options.digits`"
            )
        self.size, self.held_out, self.seed, self.reverse, self.digits = size, held_out, seed, reverse, digits

    def problems(self) -> Problems:
        generator = random.Random(self.seed)
        numbers: dict[int, None] = {}  # Distinct numbers, in the order drawn.
        while len(numbers) < self.size + self.held_out:
            numbers[generator.randrange(10**self.digits)] = None
        texts = [f"{number:0{self.digits}d}" for number in numbers]
        problems = [Problem(ask(f"{text}="), text[::-1] if self.reverse else text) for text in texts]
        return Problems(train=problems[: self.size], held_out=problems[self.size :])

    def score(self, problem: Problem, completion: str) -> Score:
        answer = problem.answer  # The completion is not stripped: trailing white space counts as a mistake.
        right = sum(a == b for a, b in zip(completion, answer, strict=False))
        # Continuing after the answer is a mistake too, so the longer of the two divides.
        value = right / max(len(completion), len(answer))
        return Score(value, {"digits": right / len(answer), "length": float(len(completion) == len(answer))})


class AddTask:
    """Sums of two numbers after worked examples: the answer to `2+3=5\\n4+1=` is `5`. The reward is 1 or 0."""

    def __init__(self, *, size: int, held_out: int, seed: int, below: int = 10, shots: int = 1) -> None:
        self.size, self.held_out, self.seed, self.below, self.shots = size, held_out, seed, below, shots
        pairs = below * (below + 1) // 2
        if held_out + shots >= pairs:
            raise UserError(
                f"there are {pairs} sums below {below}; `task.held_out: {held_out}` and `task.builtin.options.shots:"
                f" {shots}` leave none to train on: lower them"
            )

    def problems(self) -> Problems:
        pairs = [(a, b) for a in range(self.below) for b in range(self.below - a)]
        random.Random(self.seed).shuffle(pairs)
        shown, pairs = pairs[: self.shots], pairs[self.shots :]
        examples = "".join(f"{a}+{b}={a + b}\n" for a, b in shown)
        problems = [Problem(ask(f"{examples}{a}+{b}="), str(a + b)) for a, b in pairs]
        return Problems(train=problems[self.held_out :][: self.size], held_out=problems[: self.held_out])

    def score(self, problem: Problem, completion: str) -> Score:
        lines = completion.strip().splitlines()
        right = float(bool(lines) and lines[0].strip() == problem.answer)
        return Score(right, {"correct": right})


def _copy(**options: Any) -> Task:
    return DigitsTask(reverse=False, **options)


def _reverse(**options: Any) -> Task:
    return DigitsTask(reverse=True, **options)


BUILTIN: dict[str, tuple[Callable[..., Task], type]] = {
    "copy": (_copy, DigitsTask),
    "reverse": (_reverse, DigitsTask),
    "add": (AddTask, AddTask),
}


def build_builtin(name: str, options: dict[str, Any], *, size: int, held_out: int, seed: int) -> Task:
    """The built-in task with this name and these options."""
    if name not in BUILTIN:
        raise UserError(f"`task.builtin.name` is `{name}`: choose from {', '.join(sorted(BUILTIN))}")
    make, kind = BUILTIN[name]
    known = {
        key: parameter
        for key, parameter in inspect.signature(kind).parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }
    for key, value in options.items():
        if key not in known:
            raise UserError(
                f"`task.builtin.options.{key}`: the task `{name}` has no such option: choose from {', '.join(known)}"
            )
        if type(value) is not int or value < 1:
            raise UserError(f"`task.builtin.options.{key}` is {value!r} and should be an integer of 1 or more")
    return make(size=size, held_out=held_out, seed=seed, **options)
