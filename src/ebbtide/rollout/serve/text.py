"""Tokens to text as they come: never half a character, never a stop text or a part that may become one."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase as Tokenizer

BROKEN = "\N{REPLACEMENT CHARACTER}"  # what bytes decode to that are no character, or not yet
LONGEST = 4  # bytes of a character, and so tokens at most
MANY = 64  # tokens whose text is not settled


class Text:
    """The text of one sample."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self._tokenizer, self._stop = tokenizer, stop
        self._silent = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._window: list[int] = []  # the newest tokens, after some whose text is settled: a token's text depends on those before it
        self._fresh = 0  # tokens of it whose text is not settled
        self._many = MANY
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
        spoken = [token for token in tokens if token not in self._silent]
        self._window += spoken
        self._fresh += len(spoken)
        text = self._text(self._window)
        settled = text
        if text.endswith(BROKEN) and not last:
            # A character may be under way. It has no more than 4 tokens: of more than that, only the end can be part of one.
            settled = text[:-1] if self._fresh > LONGEST else text.rstrip(BROKEN)
        new = settled[self._told :]
        self._told = max(self._told, len(settled))
        if settled == text and new:
            self._window = self._window[-self._fresh :]
            self._told = len(self._text(self._window))
            self._fresh = 0
        elif self._fresh > self._many:
            self._many = MANY if self._shortened(text) else 2 * self._fresh
        self.length += len(new)
        return new

    def _text(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text

    def _shortened(self, text: str) -> bool:
        """Of many tokens that are no characters the first may go, where that changes nothing: so that a long run of them is not decoded again with each."""
        for cut in range(len(self._window) - 2 * LONGEST, len(self._window) - LONGEST):
            before = self._text(self._window[:cut])
            if before + self._text(self._window[cut:]) == text:
                self._window, self._told = self._window[cut:], self._told - len(before)
                self._fresh = len(self._window)
                return True
        return False

    def _doubtful(self) -> int:
        """Characters at the end that a stop text may begin with."""
        longest = max(map(len, self._stop), default=1) - 1
        ends = range(min(longest, len(self._held)), 0, -1)
        return next((count for count in ends if any(stop.startswith(self._held[-count:]) for stop in self._stop)), 0)
