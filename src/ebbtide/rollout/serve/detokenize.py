"""Incremental detokenization. It never emits half a character, a stop string, or the possible beginning of one."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from transformers import PreTrainedTokenizerBase as Tokenizer

BROKEN = "\N{REPLACEMENT CHARACTER}"  # the decoded form of bytes that are not (yet) a character
LONGEST = 4  # bytes of a UTF-8 character, and so the most tokens that can make one
MANY = 64  # pending tokens after which the window is shortened


class Detokenizer:
    """Turns the tokens of one sample into text."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str], shown: Collection[int] = ()) -> None:
        """`shown`: special tokens that are part of the text; all others are not."""
        self._tokenizer, self._stop, self._shows_special = tokenizer, stop, bool(shown)
        special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._special = special.difference(shown)
        # The pending tokens, after some whose text is final: the text of a token depends on those before it.
        self._window: list[int] = []
        self._pending = 0  # tokens at the end of the window whose text is not final
        self._shorten_at = MANY
        self._emitted = 0  # characters of the window's text that were decoded before
        self._held_back = ""  # decoded, but may become a stop string
        self._over = False
        self.length = 0
        """The characters so far, including those held back."""

    def add(self, tokens: Sequence[int], *, last: bool) -> str:
        """Adds tokens and returns the text that may be shown now."""
        if self._over:
            return ""
        self._held_back += self._decoded(tokens, last)
        places = [place for place in map(self._held_back.find, self._stop) if place >= 0]
        self._over = last or bool(places)
        shown = min(places) if places else len(self._held_back) - (0 if last else self._possible_stop())
        text, self._held_back = self._held_back[:shown], self._held_back[shown:]
        return text

    def _decoded(self, tokens: Sequence[int], last: bool) -> str:
        visible = [token for token in tokens if token not in self._special]
        self._window += visible
        self._pending += len(visible)
        text = self._text(self._window)
        final = text
        if text.endswith(BROKEN) and not last:
            # A character may be incomplete. It has at most 4 tokens, so of more pending tokens only the last can be
            # part of one.
            final = text[:-1] if self._pending > LONGEST else text.rstrip(BROKEN)
        new = final[self._emitted :]
        self._emitted = max(self._emitted, len(final))
        if final == text and new:
            self._window = self._window[-self._pending :]
            self._emitted = len(self._text(self._window))
            self._pending = 0
        elif self._pending > self._shorten_at:
            self._shorten_at = MANY if self._shorten_window(text) else 2 * self._pending
        self.length += len(new)
        return new

    def _text(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=not self._shows_special)
        return text

    def _shorten_window(self, text: str) -> bool:
        """Drops the first of many tokens that are no characters, if that does not change the text: a long run of them
        would otherwise be decoded again with each new token."""
        for cut in range(len(self._window) - 2 * LONGEST, len(self._window) - LONGEST):
            before = self._text(self._window[:cut])
            if before + self._text(self._window[cut:]) == text:
                self._window, self._emitted = self._window[cut:], self._emitted - len(before)
                self._pending = len(self._window)
                return True
        return False

    def _possible_stop(self) -> int:
        """The number of characters at the end that may be the beginning of a stop string."""
        longest = max(map(len, self._stop), default=1) - 1
        ends = range(min(longest, len(self._held_back)), 0, -1)
        return next(
            (count for count in ends if any(stop.startswith(self._held_back[-count:]) for stop in self._stop)), 0
        )
