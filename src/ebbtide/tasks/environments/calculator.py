"""A game to try: the last digit of a sum, with a calculator at hand.

The prompt is `27+65=`. A first turn with a `?` asks the calculator, which answers `2`; any other turn is the answer,
and ends the episode. To ask gives a reward of 0.2, and the right answer 0.8, less if it goes on after it. A small model
that starts from nothing cannot add, but it can learn to ask, and then to repeat what it was told.
"""

from __future__ import annotations

import random

from ebbtide.errors import UserError

ASKED, RIGHT = 0.2, 0.8  # Rewards.


class Calculator:
    """One episode of the game."""

    def __init__(self, digits: int = 2) -> None:
        if not 1 <= digits <= 9:
            raise UserError(f"`task.environment.options.digits: {digits}` should be from 1 to 9")
        self._digits, self._asked = digits, False

    def reset(self, seed: int) -> str:
        chance = random.Random(seed)
        one, other = (chance.randrange(10**self._digits) for _ in range(2))
        self._answer = str((one + other) % 10)
        return f"{one:0{self._digits}d}+{other:0{self._digits}d}="

    def step(self, text: str) -> tuple[str, float, bool]:
        if "?" in text and not self._asked:
            self._asked = True
            return self._answer, ASKED, False
        return "", RIGHT / len(text) if text.startswith(self._answer) else 0.0, True

    def get_metrics(self) -> dict[str, float]:
        return {"asked_calculator": float(self._asked)}


make = Calculator
