"""The tasks that ship with Ebbtide: small, verifiable, made from a seed, no download."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from typing import Any

from ebbtide.errors import UserError
from ebbtide.tasks.task import Problem, Problems, Score, Task, ask

MOST_DIGITS = 1000


class Digits:
    """Copy or reverse digits: `4821=` wants `4821` or `1284` and nothing else. Each right position earns its share."""

    def __init__(self, *, size: int, held_out: int, seed: int, reverse: bool, digits: int = 4) -> None:
        if digits > MOST_DIGITS:
            raise UserError(f"`task.builtin.options.digits: {digits}` is more than the {MOST_DIGITS} that a problem may have: lower it")
        if size + held_out > 10**digits:
            raise UserError(
                f"{digits} digits make {10**digits} problems, fewer than `task.size` + `task.held_out` = {size + held_out}: "
                "lower one of them, or raise `task.builtin.options.digits`"
            )
        self.size, self.held_out, self.seed, self.reverse, self.digits = size, held_out, seed, reverse, digits

    def problems(self) -> Problems:
        generator = random.Random(self.seed)
        numbers: dict[int, None] = {}  # in the order drawn, each once
        while len(numbers) < self.size + self.held_out:
            numbers[generator.randrange(10**self.digits)] = None
        texts = [f"{number:0{self.digits}d}" for number in numbers]
        made = [Problem(ask(f"{text}="), text[::-1] if self.reverse else text) for text in texts]
        return Problems(train=made[: self.size], held_out=made[self.size :])

    def score(self, problem: Problem, completion: str) -> Score:
        said, wanted = completion, problem.answer  # white space is no way to go on for nothing either
        right = sum(a == b for a, b in zip(said, wanted, strict=False))
        # Going on after the answer is a mistake as well: it divides by the longer of the two.
        value = right / max(len(said), len(wanted))
        return Score(value, {"digits": right / len(wanted), "length": float(len(said) == len(wanted))})


class Add:
    """Sums of two numbers, after worked examples: `2+3=5\\n4+1=` wants `5`. Right or wrong, nothing between."""

    def __init__(self, *, size: int, held_out: int, seed: int, below: int = 10, shots: int = 1) -> None:
        self.size, self.held_out, self.seed, self.below, self.shots = size, held_out, seed, below, shots
        pairs = below * (below + 1) // 2
        if held_out + shots >= pairs:
            raise UserError(
                f"there are {pairs} sums below {below}; `task.held_out: {held_out}` and `task.builtin.options.shots: {shots}` leave none to train on: lower them"
            )

    def problems(self) -> Problems:
        pairs = [(a, b) for a in range(self.below) for b in range(self.below - a)]
        random.Random(self.seed).shuffle(pairs)
        shown, pairs = pairs[: self.shots], pairs[self.shots :]
        examples = "".join(f"{a}+{b}={a + b}\n" for a, b in shown)
        made = [Problem(ask(f"{examples}{a}+{b}="), str(a + b)) for a, b in pairs]
        return Problems(train=made[self.held_out :][: self.size], held_out=made[: self.held_out])

    def score(self, problem: Problem, completion: str) -> Score:
        lines = completion.strip().splitlines()
        right = float(bool(lines) and lines[0].strip() == problem.answer)
        return Score(right, {"correct": right})


def _copy(**options: Any) -> Task:
    return Digits(reverse=False, **options)


def _reverse(**options: Any) -> Task:
    return Digits(reverse=True, **options)


BUILTIN: dict[str, tuple[Callable[..., Task], type]] = {"copy": (_copy, Digits), "reverse": (_reverse, Digits), "add": (Add, Add)}


def build_builtin(name: str, options: dict[str, Any], *, size: int, held_out: int, seed: int) -> Task:
    if name not in BUILTIN:
        raise UserError(f"`task.builtin.name` is `{name}`; there are: {', '.join(sorted(BUILTIN))}")
    make, kind = BUILTIN[name]
    known = {
        key: parameter for key, parameter in inspect.signature(kind).parameters.items() if parameter.default is not inspect.Parameter.empty
    }
    for key, value in options.items():
        if key not in known:
            raise UserError(f"`task.builtin.options.{key}`: the task `{name}` has no such option; it has: {', '.join(known)}")
        if type(value) is not int or value < 1:
            raise UserError(f"`task.builtin.options.{key}` is {value!r} and should be a whole number of 1 or more")
    return make(size=size, held_out=held_out, seed=seed, **options)
