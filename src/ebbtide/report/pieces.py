"""Where each token's text ends in a completion: what a page needs to colour a text by its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from transformers import PreTrainedTokenizerBase as Tokenizer

BROKEN = "\N{REPLACEMENT CHARACTER}"  # what bytes decode to that are no character, or not yet
LONGEST = 4  # bytes of a character, and so tokens at most


class Pieces:
    """Every token is decoded alone, once a run, and then looked for in the texts: 65,536 tokens take about 0.07 s on one core."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._alone: dict[int, str] = {}
        self._together = lru_cache(2**16)(lambda tokens: str(tokenizer.decode(tokens, skip_special_tokens=True)))

    def lengths(self, tokens: Sequence[int], text: str) -> list[int]:
        """The characters of `text` that each token made; a character that several tokens made is the last one's, and what is cut off the text, as special
        tokens and a stop text are, is in no length. Whatever the tokenizer does to its tokens' texts when it joins them, the lengths add up to the text."""
        self._learn(tokens)
        lengths = [0] * len(tokens)
        done = 0  # characters of the text that have their tokens
        lost: list[int] = []  # places of tokens after those that were not found: parts of characters, or other than they are alone
        room = 1  # characters that they can have made. 1 more: where a mark begins a word, the word alone comes without the space before it
        for place, token in enumerate(tokens):
            alone = self._alone[token]
            if not alone:
                continue
            found = -1 if BROKEN in alone else text.find(alone, done, done + room + len(alone))
            if found < 0:
                lost.append(place)
                room += len(alone)
                continue
            if found > done:
                self._share(text[done:found], lost or [place], tokens, lengths)
            lengths[place] += len(alone)
            done, lost, room = found + len(alone), [], 1
        if done < len(text):
            self._share(text[done:], lost or [len(tokens) - 1], tokens, lengths)
        return lengths

    def _learn(self, tokens: Sequence[int]) -> None:
        new = sorted(set(tokens) - self._alone.keys())
        if new:  # of no tokens, transformers makes one text
            self._alone.update(zip(new, self._tokenizer.batch_decode([[token] for token in new], skip_special_tokens=True), strict=True))

    def _share(self, text: str, places: list[int], tokens: Sequence[int], lengths: list[int]) -> None:
        """Gives a text to the tokens at these places: each whole character to the token that ends it, what is left to the last."""
        done, begun = 0, 0
        for number, place in enumerate(places):
            if not text[done:] or number - begun >= LONGEST:
                break
            together = self._together(tuple(tokens[one] for one in places[begun : number + 1]))
            if BROKEN not in together and text.startswith(together, done):
                lengths[place] += len(together)
                done, begun = done + len(together), number + 1
        lengths[places[-1]] += len(text) - done
