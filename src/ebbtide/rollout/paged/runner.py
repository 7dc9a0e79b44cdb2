"""The interface of a model runner, which runs what the scheduler decides: it prefills chunks, decodes samples by one
token each, and samples tokens from the logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from ebbtide.rollout.engine import SamplingParams
from ebbtide.rollout.paged.attention import KVCache
from ebbtide.rollout.paged.scheduler import PrefillChunk, ScheduledSample


@dataclass(frozen=True)
class SampleOp:
    """One token to sample: for which sample, with which parameters, and by which uniform number."""

    sample: ScheduledSample
    sampling: SamplingParams
    uniform: float


@dataclass(frozen=True)
class PendingTokens:
    """The sampled tokens of a pass, which may still be in flight."""

    samples: list[ScheduledSample]
    wait: Callable[[], tuple[Sequence[int], Sequence[float], Sequence[float]]]
    """Waits for the pass. Returns the tokens, their log-probs at the sampling temperature, and at temperature 1."""


class Runner(Protocol):
    @property
    def is_fused(self) -> bool:
        """Whether the model runs with the fused blocks of training."""
        ...

    def attach_cache(self, cache: KVCache, prompt_blocks: int, own_blocks: int) -> None:
        """Uses this KV cache from now on, for prompts of at most `prompt_blocks` blocks and completions of at most
        `own_blocks`."""
        ...

    def detach_cache(self) -> None:
        """Releases the KV cache."""
        ...

    def prefill(self, chunks: Sequence[PrefillChunk], ops: Sequence[Sequence[SampleOp]]) -> PendingTokens:
        """Prefills chunks, and samples the first tokens that follow each of them."""
        ...

    def decode(self, ops: Sequence[SampleOp]) -> PendingTokens:
        """Samples the next token of each sample; its newest one becomes part of the KV cache."""
        ...

    def probing(self) -> AbstractContextManager[None]:
        """Within this context, passes are probes: no CUDA graph is captured and no buffer is kept for later."""
        ...
