"""Tells the reasoning of a completion from its answer, in whole completions and as their text arrives.

Reasoning stands between two marks, the first of which may be the end of the prompt, or in channels (gpt-oss), where all
but the channel `final` is reasoning. Marks may be special tokens, which the text of a completion does not have: these
are put back into it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean

from transformers import PreTrainedTokenizerBase as Tokenizer

from ebbtide.config.reasoning import ReasoningFormat
from ebbtide.errors import UserError
from ebbtide.rollout.engine import Completion

THINK = ("<think>", "</think>")
KNOWN = (THINK, ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"), ("<|channel>", "<channel|>"))
"""The marks of models that people use; those of Gemma 4 are the last."""
CHANNEL, MESSAGE, START, CONSTRAIN = "<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>")
HARMONY = (CHANNEL, MESSAGE, START, CONSTRAIN, *ENDS)
TAIL = 32
"""Tokens at the end of a prompt in which an opening mark is looked for."""


@dataclass(frozen=True)
class Parsed:
    """A completion in two parts."""

    reasoning: str
    answer: str
    """Without white space before it; empty if the reasoning did not end."""
    is_unfinished: bool
    """Whether there is reasoning that did not end."""
    reasoning_tokens: int | None
    """The number of tokens up to the end of the reasoning; None if its marks are not tokens of their own."""


class ReasoningParser:
    """Parses the completions of one model."""

    def __init__(self, format: ReasoningFormat, tokenizer: Tokenizer, key: str) -> None:
        """`key` is the setting's name in messages."""
        self._tokenizer = tokenizer
        self.marks = _marks(format, tokenizer, key)
        """The two marks around the reasoning, or all marks of the channels."""
        added = {token.content: (number, token.special) for number, token in tokenizer.added_tokens_decoder.items()}
        found = {mark: added[mark] for mark in self.marks if mark in added}
        if len(self.marks) > 2 and CHANNEL not in found:
            raise UserError(f"`{key}: harmony`: the model's tokenizer has no token `{CHANNEL}`: choose another format")
        self.special = {number: mark for mark, (number, special) in found.items() if special}
        """The marks that are special tokens: these are not in the text of a completion."""
        self._end = found.get(self.marks[1], (None,))[0]  # `</think>`, or `<|message|>`

    def opens(self, prompt: Sequence[int]) -> str:
        """The end of a prompt, if reasoning or a channel begins in it: else an empty text."""
        text = str(self._tokenizer.decode(prompt[-TAIL:], skip_special_tokens=False)).rstrip()
        if len(self.marks) == 2:
            return self.marks[0] if text.endswith(self.marks[0]) else ""
        return text[text.rfind(CHANNEL) :] if CHANNEL in text.rpartition(START)[2] else ""

    def splitter(self, opening: str) -> ReasoningSplitter:
        """Splits the text of a completion as it arrives, after a prompt with this opening."""
        found = _Marked(*self.marks) if len(self.marks) == 2 else _Channels(self.marks)
        found.add(opening, last=False)
        return found

    def text(self, completion: Completion, stop: Sequence[str] = ()) -> str:
        """The text of a completion with the marks that are special tokens. It ends before the first of the stop
        texts, as the text without them does."""
        if not any(token in self.special for token in completion.tokens):
            return completion.text
        text = ""
        for mark, tokens in groupby(completion.tokens, self.special.get):
            some = list(tokens)
            text += mark * len(some) if mark else str(self._tokenizer.decode(some, skip_special_tokens=True))
        return text[: min((place for place in map(text.find, stop) if place >= 0), default=len(text))]

    def parse(self, prompt: Sequence[int], completion: Completion, stop: Sequence[str] = ()) -> Parsed:
        """Parses a completion. What precedes the end of the reasoning is never part of the answer."""
        text, opening = self.text(completion, stop), self.opens(prompt)
        if len(self.marks) == 2 and self.marks[1] in text:  # what begins before its mark is reasoning as well
            opening = self.marks[0]
        splitter = self.splitter(opening)
        reasoning, answer = splitter.add(text, last=True)
        if splitter.is_reasoning:
            return Parsed(reasoning, "", True, len(completion.tokens))
        return Parsed(reasoning, answer.lstrip(), False, self._count(completion))

    def _count(self, completion: Completion) -> int | None:
        if self._end is None:
            return None
        ends = [place for place, token in enumerate(completion.tokens) if token == self._end]
        if not ends:
            return 0
        return 1 + (ends[0] if len(self.marks) == 2 else ends[-1])


def _marks(format: ReasoningFormat, tokenizer: Tokenizer, key: str) -> tuple[str, ...]:
    if isinstance(format, list):
        return format[0], format[1]
    if format != "auto":
        return THINK if format == "think" else HARMONY
    template = str(tokenizer.chat_template or "")
    if CHANNEL in template:
        return HARMONY
    for marks in KNOWN:
        if marks[1] in template:
            return marks
    raise UserError(
        f"`{key}: auto`: the model's chat template has none of the marks of reasoning that are known: name them, as in"
        ' `["<think>", "</think>"]`'
    )


def reasoning_metrics(parsed: Sequence[Parsed]) -> dict[str, float]:
    """The metrics of parsed completions, for metrics.jsonl."""
    counts = [one.reasoning_tokens for one in parsed if one.reasoning_tokens is not None]
    if not parsed:
        return {}
    found = {"reasoning_unfinished": fmean(one.is_unfinished for one in parsed)}
    return found | ({"reasoning_tokens": fmean(counts)} if len(counts) == len(parsed) else {})


class ReasoningSplitter:
    """Splits a text as it arrives. It never gives away the beginning of what may become a mark."""

    def __init__(self, marks: Sequence[str]) -> None:
        self._all, self._held_back = marks, ""
        self.is_reasoning = False
        """Whether it is inside of reasoning now."""

    def add(self, text: str, *, last: bool) -> tuple[str, str]:
        """Adds text; returns (reasoning, answer), as much of both as is certain now."""
        self._parts: list[tuple[bool, str]] = []
        rest = self._held_back + text
        while found := [(place, mark) for mark in self._all if (place := rest.find(mark)) >= 0]:
            place, mark = min(found)
            self._text(rest[:place])
            rest = rest[place + len(mark) :]
            self._mark(mark)
        held = 0 if last else self._possible_mark(rest)
        self._held_back = rest[len(rest) - held :]
        self._text(rest[: len(rest) - held])
        if last:
            self._close()
        reasoning, answer = ("".join(part for is_one, part in self._parts if is_one is kind) for kind in (True, False))
        return reasoning, answer

    def _possible_mark(self, text: str) -> int:
        ends = range(min(max(map(len, self._all)) - 1, len(text)), 0, -1)
        return next((count for count in ends if any(mark.startswith(text[-count:]) for mark in self._all)), 0)

    def _text(self, text: str) -> None:
        self._parts.append((self.is_reasoning, text))

    def _mark(self, mark: str) -> None:
        raise NotImplementedError

    def _close(self) -> None:
        pass


class _Marked(ReasoningSplitter):
    """Reasoning between two marks. Only the first reasoning counts as such."""

    def __init__(self, start: str, end: str) -> None:
        super().__init__((start, end))
        self._start, self._is_over = start, False

    def _mark(self, mark: str) -> None:
        if mark == self._start and not self._is_over:
            self.is_reasoning = True
        elif mark != self._start and self.is_reasoning:
            self.is_reasoning, self._is_over = False, True
        else:
            self._text(mark)


class _Channels(ReasoningSplitter):
    """The channels of gpt-oss: a header up to `<|message|>`, which names the channel, and then its text."""

    def __init__(self, marks: Sequence[str]) -> None:
        super().__init__(marks)
        self._header: str | None = ""
        self._no_header = ""  # what turned out to be none: no message followed
        self._has_channel = self._has_answer = False

    def _text(self, text: str) -> None:
        if self._header is None:
            super()._text(text)
        else:
            self._header += text

    def _mark(self, mark: str) -> None:
        if mark == MESSAGE and self._header is not None:
            channel = self._header.rpartition(CHANNEL)[2].partition(CONSTRAIN)[0].strip()
            self._header, self.is_reasoning = None, self._has_channel and channel != "final"
            self._has_answer = self._has_answer or not self.is_reasoning
        elif mark in (CHANNEL, CONSTRAIN):
            self._header = (self._header or "") + mark
            self._has_channel = True
        elif mark in (START, *ENDS):
            self._no_header += self._header or ""
            self._header = ""

    def _close(self) -> None:
        if not self._has_channel:  # no channels at all: it is all answer
            self._parts.append((False, self._no_header + (self._header or "")))
        self.is_reasoning = self._has_channel and not self._has_answer
