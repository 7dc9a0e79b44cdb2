"""An environment for environments.py: each of its answers takes a while, as a tool does that is somewhere else."""

from __future__ import annotations

import time


class SlowTool:
    def __init__(self, seconds: float = 0.2, turns: int = 8) -> None:
        self._seconds, self._turns = seconds, turns

    def reset(self, seed: int) -> str:
        self._left = self._turns
        return f"{seed % 100_000:05d}" * 20

    def step(self, text: str) -> tuple[str, float, bool]:
        time.sleep(self._seconds)
        self._left -= 1
        return f"{len(text):05d}", 0.0, self._left == 0
