"""The interface of a rollout engine: prompts and seeds in; token ids, log-probs and finish reasons out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from ebbtide.errors import UserError
from ebbtide.progress import Progress


@dataclass(frozen=True)
class SamplingParams:
    """The sampling parameters: how the next token is chosen, and when a completion ends."""

    max_new_tokens: int
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    """Whether to continue past end tokens, up to `max_new_tokens`: for measurements."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a completion, besides the model's end tokens."""

    def end_tokens(self, of_model: Sequence[int]) -> list[int]:
        """The tokens that end a completion of a model with these end tokens."""
        return [*(() if self.ignore_eos else of_model), *self.stop_token_ids]


@dataclass(frozen=True)
class Request:
    """One prompt, and a seed for each of its samples. A sample's randomness depends on its own seed alone, never on the
    rest of the batch."""

    prompt: list[int]
    seeds: list[int]
    adapter: int = 0
    """The number of the adapter that it is for, where the model has several by name (`lora` of `ebbtide serve`); 0 is
    none. The paged engine alone has them."""


@dataclass(frozen=True)
class Completion:
    """The completion of one sample."""

    tokens: list[int]
    """The sampled tokens, with the end token or stop text that ended them."""
    logprobs: list[float]
    """The log-prob of each token at the sampling temperature (greedy: at 1), over the whole vocabulary."""
    plain_logprobs: list[float]
    """The log-prob of each token at temperature 1."""
    finish: Literal["stop", "length"]
    text: str
    """The tokens as text, without special tokens and without the stop text."""


def diverged_error() -> UserError:
    """Makes the error of an engine that finds log-probs that are not finite."""
    return UserError(
        "the model's logits are not finite: its weights have diverged. Lower `optimizer.lr` or"
        " `optimizer.weight_decay`, lengthen `optimizer.warmup_steps`, or set `optimizer.clip_norm`; metrics.jsonl"
        " shows at which step this began"
    )


@runtime_checkable
class PreemptingEngine(Protocol):
    """An engine that preempts samples when its KV cache is full, and counts them."""

    @property
    def preempted(self) -> int:
        """How many times a sample was preempted in the last call."""
        ...


class Engine(Protocol):
    def generate(
        self, requests: Sequence[Request], sampling: SamplingParams, progress: Progress
    ) -> list[list[Completion]]:
        """Generates one completion for each seed of each request."""
        ...


def request_sizes(requests: Sequence[Request], sampling: SamplingParams) -> list[int]:
    """Returns the most tokens that each request can have, over all of its samples."""
    return [len(request.seeds) * (len(request.prompt) + sampling.max_new_tokens) for request in requests]
