"""What computes a step of the schedule: prompts read, samples decoded by one token, tokens drawn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from ebbtide.rollout.engine import Sampling
from ebbtide.rollout.paged.attention import Cache
from ebbtide.rollout.paged.schedule import Chunk, Sample


@dataclass(frozen=True)
class Draw:
    """A token to be drawn: whose, how, and the number that decides."""

    sample: Sample
    sampling: Sampling
    uniform: float


@dataclass(frozen=True)
class Drawn:
    """Tokens that were drawn, or are under way."""

    samples: list[Sample]
    wait: Callable[[], tuple[Sequence[int], Sequence[float], Sequence[float]]]
    """The tokens, their log-probs at the sampling temperature, and at 1."""


class Runner(Protocol):
    def begin(self, cache: Cache, prompt_blocks: int, own_blocks: int) -> None:
        """Uses a cache from now on, for prompts and samples of at most so many blocks."""
        ...

    def end(self) -> None:
        """Lets go of the cache."""
        ...

    def read(self, chunks: Sequence[Chunk], draws: Sequence[Sequence[Draw]]) -> Drawn:
        """Reads chunks, and draws the first tokens that follow from each."""
        ...

    def decode(self, draws: Sequence[Draw]) -> Drawn:
        """The next token of samples; their last one becomes part of the cache."""
        ...

    def trying(self) -> AbstractContextManager[None]:
        """Inside this block, what is computed is a try: nothing is captured or kept for it."""
        ...
