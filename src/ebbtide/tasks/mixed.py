"""Several tasks in one: their problems are drawn in turns by their weights, and each scores its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction

from ebbtide.tasks.task import Problem, Problems, Score, Task


def turns(weights: Sequence[float]) -> Iterator[int]:
    """Whose turn it is, without end: always of the one that is furthest behind its share. After as many turns as make
    every share a whole number, each has had exactly its share."""
    exact = [Fraction(str(weight)) for weight in weights]
    shares = [weight / sum(exact) for weight in exact]
    due = [Fraction(0)] * len(shares)
    while True:
        due = [before + share for before, share in zip(due, shares, strict=True)]
        chosen = due.index(max(due))
        due[chosen] -= 1
        yield chosen


class MixedTask:
    """The problems of several tasks."""

    def __init__(self, tasks: Mapping[str, Task], weights: Sequence[float]) -> None:
        self._tasks, self._weights = tasks, weights

    def problems(self) -> Problems:
        """Those to train on task by task; the held-out ones in turns, so that the first ones are of all tasks."""
        found = {name: task.problems() for name, task in self._tasks.items()}
        train = [replace(problem, task=name) for name, some in found.items() for problem in some.train]
        waiting = [[replace(one, task=name) for one in reversed(some.held_out)] for name, some in found.items()]
        held_out: list[Problem] = []
        for turn in turns(self._weights):
            if not any(waiting):
                break
            if waiting[turn]:
                held_out.append(waiting[turn].pop())
        return Problems(train, held_out)

    def score(self, problem: Problem, completion: str) -> Score:
        assert problem.task is not None
        return self._tasks[problem.task].score(problem, completion)
