"""What a rollout engine is: prompts and seeds in; token ids, log-probs and finish reasons out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from ebbtide.errors import UserError
from ebbtide.progress import Progress


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen."""

    max_new_tokens: int
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    ignore_end: bool = False
    """Go on past end tokens, to the last token: for measuring."""


@dataclass(frozen=True)
class Request:
    """One prompt, and a seed for each of its samples. A sample's randomness comes from its own seed alone, never from its neighbours."""

    prompt: list[int]
    seeds: list[int]


@dataclass(frozen=True)
class Completion:
    """One sample."""

    tokens: list[int]
    """The sampled tokens, with the end token or stop text that ended them."""
    logprobs: list[float]
    """Of each token, at the sampling temperature (greedy: at 1), over the whole vocabulary."""
    plain_logprobs: list[float]
    """The same at temperature 1."""
    finish: Literal["stop", "length"]
    text: str
    """The tokens as text, without special tokens and without the stop text."""


def diverged() -> UserError:
    """For an engine that finds log-probs that are no numbers."""
    return UserError(
        "the model's logits are not finite: its weights have diverged. Lower `optimizer.lr` or `optimizer.weight_decay`, lengthen "
        "`optimizer.warmup_steps`, or set `optimizer.clip_norm`; metrics.jsonl shows when it began"
    )


@runtime_checkable
class Preempting(Protocol):
    """An engine in which samples give way to others."""

    @property
    def preempted(self) -> int:
        """How many did in the last call."""
        ...


class Engine(Protocol):
    def generate(self, requests: Sequence[Request], sampling: Sampling, progress: Progress) -> list[list[Completion]]:
        """For each request, one completion per seed."""
        ...
