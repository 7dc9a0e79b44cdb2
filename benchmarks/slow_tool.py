"""An environment whose tool takes a while, for benchmarks/environments.py."""

import time


class SlowTool:
    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def reset(self, seed: int) -> str:
        return f"Problem {seed:06d}. " * 8

    def step(self, text: str) -> tuple[str, float, bool]:
        time.sleep(self._seconds)
        return "The tool says 42.", 0.0, False
