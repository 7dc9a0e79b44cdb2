"""Maps each token of a completion to its characters, so that the page can colour a text by its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from transformers import PreTrainedTokenizerBase as Tokenizer

BROKEN = "\N{REPLACEMENT CHARACTER}"  # the decoded form of bytes that are not (yet) a character
LONGEST = 4  # bytes of a UTF-8 character, and so the most tokens that can make one


class TokenSpans:
    """Decodes every token by itself, once per run, and then finds it in the texts: 65,536 tokens take about 0.07 s on
    one core."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._alone: dict[int, str] = {}
        self._together = lru_cache(2**16)(lambda tokens: str(tokenizer.decode(tokens, skip_special_tokens=True)))

    def lengths(self, tokens: Sequence[int], text: str) -> list[int]:
        """The number of characters of `text` that each token made. A character made by several tokens counts for the
        last of them. What is not in the text (special tokens, a stop string) counts for none. Whatever the tokenizer
        does to tokens when it joins them, the lengths add up to the text."""
        self._decode_new(tokens)
        lengths = [0] * len(tokens)
        done = 0  # characters of the text that are assigned to tokens
        # Indices of the tokens since then that were not found: parts of characters, or tokens that decode differently
        # by themselves.
        unmatched: list[int] = []
        # The most characters that these can have made. It starts at 1: where a marker starts a word (SentencePiece),
        # a token that is decoded alone lacks the space before it.
        room = 1
        for index, token in enumerate(tokens):
            alone = self._alone[token]
            if not alone:
                continue
            found = -1 if BROKEN in alone else text.find(alone, done, done + room + len(alone))
            if found < 0:
                unmatched.append(index)
                room += len(alone)
                continue
            if found > done:
                self._assign(text[done:found], unmatched or [index], tokens, lengths)
            lengths[index] += len(alone)
            done, unmatched, room = found + len(alone), [], 1
        if done < len(text):
            self._assign(text[done:], unmatched or [len(tokens) - 1], tokens, lengths)
        return lengths

    def _decode_new(self, tokens: Sequence[int]) -> None:
        new = sorted(set(tokens) - self._alone.keys())
        if new:  # transformers decodes an empty list to one text
            self._alone.update(
                zip(
                    new, self._tokenizer.batch_decode([[token] for token in new], skip_special_tokens=True), strict=True
                )
            )

    def _assign(self, text: str, indices: list[int], tokens: Sequence[int], lengths: list[int]) -> None:
        """Assigns a text to the tokens at these indices: each whole character to the token that completes it, the rest
        to the last token."""
        done, first = 0, 0
        for number, index in enumerate(indices):
            if not text[done:] or number - first >= LONGEST:
                break
            together = self._together(tuple(tokens[one] for one in indices[first : number + 1]))
            if BROKEN not in together and text.startswith(together, done):
                lengths[index] += len(together)
                done, first = done + len(together), number + 1
        lengths[indices[-1]] += len(text) - done
