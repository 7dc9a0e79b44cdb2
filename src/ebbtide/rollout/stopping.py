"""Decides when a completion ends, by end tokens and stop strings, and which text of it is scored."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase as Tokenizer

from ebbtide.rollout.engine import Completion, SamplingParams


class StopCondition:
    """The stop condition of one set of sampling parameters."""

    def __init__(self, sampling: SamplingParams, tokenizer: Tokenizer, end_tokens: Sequence[int]) -> None:
        self._stop, self._tokenizer = sampling.stop, tokenizer
        self._end_tokens = frozenset(sampling.end_tokens(end_tokens))
        # How many tokens back a stop string is looked for. A token is at least one byte; 8 more, as the first tokens of
        # a window may decode differently than after their predecessors.
        self.window = max((len(text.encode()) for text in self._stop), default=0) + 8

    def is_reached(self, before: Sequence[int], token: int) -> bool:
        """Tells whether a sampled token ends a completion: as an end token, or because it completes a stop string."""
        if token in self._end_tokens:
            return True
        if not self._stop:
            return False
        text = self._tokenizer.decode([*before[-self.window :], token], skip_special_tokens=False)
        return any(stop in text for stop in self._stop)

    def completion(
        self, tokens: list[int], logprobs: list[float], plain_logprobs: list[float], *, stopped: bool
    ) -> Completion:
        """Makes the completion of these tokens. Its text ends before the first stop string."""
        text = self._tokenizer.decode(tokens, skip_special_tokens=True)
        cut = min((index for index in map(text.find, self._stop) if index >= 0), default=len(text))
        return Completion(tokens, logprobs, plain_logprobs, "stop" if stopped else "length", text[:cut])
