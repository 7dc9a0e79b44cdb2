"""Several tasks in one: their problems are drawn in turns by their weights, and each scores its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from math import lcm

from ebbtide.tasks.task import Problem, Problems, Score, Task


def turns(weights: Sequence[float]) -> Iterator[int]:
    """Whose turn it is, without end, of two or more. No one is ever off its share by a whole turn, so each has had
    exactly its share whenever all shares are whole numbers. (Tijdeman's solution of the chairman assignment problem: of
    those who are due, the one whose turn would be too late first. To choose who is furthest behind would not do.)"""
    exact = [Fraction(str(weight)) for weight in weights]
    scale = lcm(*(weight.denominator for weight in exact))
    shares = [int(weight * scale) for weight in exact]  # of `whole`, so that all below is whole numbers
    whole, sides = sum(shares), 2 * len(shares) - 2
    due = [0] * len(shares)
    while True:
        due = [before + share for before, share in zip(due, shares, strict=True)]
        left = {
            place: ((sides - 1) * whole - sides * one) / shares[place]
            for place, one in enumerate(due)
            if sides * one >= whole
        }
        chosen = min(left, key=lambda place: left[place])
        due[chosen] -= whole
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
        while len(left := [place for place, some in enumerate(waiting) if some]) > 1:
            for turn in turns([self._weights[place] for place in left]):
                held_out.append((some := waiting[left[turn]]).pop())
                if not some:
                    break
        return Problems(train, held_out + [one for some in waiting for one in reversed(some)])

    def score(self, problem: Problem, completion: str) -> Score:
        assert problem.task is not None
        return self._tasks[problem.task].score(problem, completion)
