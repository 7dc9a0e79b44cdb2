"""Tokens to text as they come: never half a character, never a stop text or a part that may become one."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase as Tokenizer

BROKEN = "\N{REPLACEMENT CHARACTER}"  # what bytes decode to that are no character, or not yet
LONGEST = 4  # bytes of a character, and so tokens at most


class Text:
    """The text of one sample."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self._tokenizer, self._stop = tokenizer, stop
        self._window: list[int] = []  # the newest tokens, after some whose text is settled: a token's text depends on those before it
        self._fresh = 0  # tokens of it whose text is not settled
        self._told = 0  # characters of the window's text that were taken
        self._held = ""  # taken, and may become a stop text
        self._over = False
        self.length = 0
        """Characters so far, with those that are held back."""

    def add(self, tokens: Sequence[int], *, last: bool) -> str:
        """What may be shown now."""
        if self._over:
            return ""
        self._held += self._decoded(tokens, last)
        places = [place for place in map(self._held.find, self._stop) if place >= 0]
        self._over = last or bool(places)
        shown = min(places) if places else len(self._held) - (0 if last else self._doubtful())
        text, self._held = self._held[:shown], self._held[shown:]
        return text

    def _decoded(self, tokens: Sequence[int], last: bool) -> str:
        self._window += tokens
        self._fresh += len(tokens)
        text: str = self._tokenizer.decode(self._window, skip_special_tokens=True)
        settled = text
        if text.endswith(BROKEN) and not last:
            # A character may be under way. It has no more than 4 tokens: of more than that, only the end can be part of one.
            settled = text[:-1] if self._fresh > LONGEST else text.rstrip(BROKEN)
        new = settled[self._told :]
        self._told = max(self._told, len(settled))
        if settled == text and new:
            self._window = self._window[-self._fresh :]
            self._told = len(self._tokenizer.decode(self._window, skip_special_tokens=True))
            self._fresh = 0
        self.length += len(new)
        return new

    def _doubtful(self) -> int:
        """Characters at the end that a stop text may begin with."""
        longest = max(map(len, self._stop), default=1) - 1
        ends = range(min(longest, len(self._held)), 0, -1)
        return next((count for count in ends if any(stop.startswith(self._held[-count:]) for stop in self._stop)), 0)
