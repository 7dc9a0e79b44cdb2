"""The problems of an environment that has its own: one for each seed."""

from __future__ import annotations

import random

from ebbtide.tasks.task import Problem, Problems, Score


class EnvironmentTask:
    """Problems without a prompt: the environment begins with one, by the seed of the problem."""

    def __init__(self, *, size: int, held_out: int, seed: int) -> None:
        self._size, self._held_out = size, held_out
        # The run's seed is spread, so that neighbouring run seeds share no problems.
        self._first = random.Random(seed).randrange(2**30)

    def problems(self) -> Problems:
        made = [Problem([], metadata={"seed": self._first + number}) for number in range(self._size + self._held_out)]
        return Problems(train=made[self._held_out :], held_out=made[: self._held_out])

    def score(self, problem: Problem, completion: str) -> Score:
        raise NotImplementedError("the environment gives the reward")
