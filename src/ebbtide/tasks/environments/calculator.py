"""A game to try: sums, with a calculator at hand.

The prompt is `27+65=`. A first turn with a `?` asks the calculator, which answers with the sum; any other turn is the
answer, and ends the episode. To ask gives a reward of 0.2, and an answer the fraction of its digits that are right. A
small model that starts from nothing cannot add, but it can learn to ask, and then to copy.
"""

from __future__ import annotations

import random

from ebbtide.errors import UserError

ASKED = 0.2  # The reward of a question.


class Calculator:
    """One episode of the game."""

    def __init__(self, digits: int = 2) -> None:
        if not 1 <= digits <= 9:
            raise UserError(f"`task.environment.options.digits: {digits}` should be from 1 to 9")
        self._digits, self._used = digits, False

    def reset(self, seed: int) -> str:
        chance = random.Random(seed)
        one, other = (chance.randrange(10**self._digits // 2) for _ in range(2))
        self._sum = f"{one + other:0{self._digits}d}"
        return f"{one:0{self._digits}d}+{other:0{self._digits}d}="

    def step(self, text: str) -> tuple[str, float, bool]:
        if "?" in text and not self._used:
            self._used = True
            return f"{self._sum}=", ASKED, False
        right = sum(mine == theirs for mine, theirs in zip(text, self._sum, strict=False))
        return "", right / max(len(text), len(self._sum)), True

    def get_metrics(self) -> dict[str, float]:
        return {"asked_calculator": float(self._used)}


make = Calculator
