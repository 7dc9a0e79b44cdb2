"""A task for measuring: prompts of a fixed length, and a reward that differs between any two completions."""

from __future__ import annotations

import hashlib
import random

from ebbtide.tasks.task import Problem, Problems, Score, ask


class Varied:
    def __init__(self, length: int = 126, size: int = 64) -> None:
        self.length, self.size = length, size

    def problems(self) -> Problems:
        generator = random.Random(0)
        texts = ["".join(generator.choices("abcdefgh", k=self.length)) for _ in range(self.size)]
        return Problems([Problem(ask(text)) for text in texts], [])

    def score(self, problem: Problem, completion: str) -> Score:
        return Score(hashlib.blake2b(completion.encode(), digest_size=2).digest()[0] / 255)
