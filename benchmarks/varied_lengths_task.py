"""As varied_task.py, with prompts of 100 to 126 tokens."""

from __future__ import annotations

import random

from varied_task import Varied

from ebbtide.tasks.task import Problem, Problems, ask


class VariedLengths(Varied):
    def problems(self) -> Problems:
        chance = random.Random(0)
        texts = ["".join(chance.choices("abcdefgh", k=chance.randint(100, self.length))) for _ in range(self.size)]
        return Problems([Problem(ask(text)) for text in texts], [])
