"""When a completion ends, and what it is then: end tokens, stop texts, the text that is scored."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase as Tokenizer

from ebbtide.rollout.engine import Completion, Sampling


class Ending:
    """For one way of sampling."""

    def __init__(self, sampling: Sampling, tokenizer: Tokenizer, end_tokens: Sequence[int]) -> None:
        self._stop, self._tokenizer = sampling.stop, tokenizer
        self._end_tokens = frozenset(() if sampling.ignore_end else end_tokens)
        # Tokens to look back on. A token is a byte at least; a few more, as the first ones of a window may decode otherwise than in their place.
        self.window = max((len(text.encode()) for text in self._stop), default=0) + 8

    def reached(self, before: Sequence[int], token: int) -> bool:
        """Whether a sampled token ends those before it: as an end token, or with a stop text."""
        if token in self._end_tokens:
            return True
        if not self._stop:
            return False
        text = self._tokenizer.decode([*before[-self.window :], token], skip_special_tokens=False)
        return any(stop in text for stop in self._stop)

    def completion(self, tokens: list[int], logprobs: list[float], plain_logprobs: list[float], *, stopped: bool) -> Completion:
        """Of all the tokens up to the end."""
        text = self._tokenizer.decode(tokens, skip_special_tokens=True)
        cut = min((place for place in map(text.find, self._stop) if place >= 0), default=len(text))
        return Completion(tokens, logprobs, plain_logprobs, "stop" if stopped else "length", text[:cut])
