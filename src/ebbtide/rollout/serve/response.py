"""Responses in OpenAI's formats: whole, or chunk by chunk."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ebbtide.rollout.reasoning import ReasoningSplitter
from ebbtide.rollout.serve.detokenize import Detokenizer
from ebbtide.rollout.serve.queue import QueuedRequest, TokenEvent
from ebbtide.rollout.serve.schema import Body, ChatBody
from ebbtide.rollout.serve.to_request import ServedModel


@dataclass
class SampleDelta:
    """The text and tokens of a sample, or of a part of one."""

    index: int
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    """The position in the whole text where each token begins."""
    finish: str | None = None
    reasoning: str = ""
    """The reasoning before the text, where it is given apart."""

    def __iadd__(self, other: SampleDelta) -> SampleDelta:
        self.text += other.text
        self.reasoning += other.reasoning
        self.tokens += other.tokens
        self.logprobs += other.logprobs
        self.offsets += other.offsets
        self.finish = other.finish
        return self


class ResponseBuilder:
    """Builds the response to one request."""

    def __init__(self, body: Body, queued: QueuedRequest, served: ServedModel) -> None:
        self._body, self._served = body, served
        self._chat, self._n = isinstance(body, ChatBody), body.n or 1
        self._prompts = [request.prompt for request in queued.requests]
        parser = served.reasoning if self._chat else None
        marks = parser.special if parser is not None else ()
        self._texts = [Detokenizer(served.tokenizer, body.stops, marks) for _ in range(queued.sample_count)]
        self._splitters: list[ReasoningSplitter] = []
        if parser is not None:
            opening = parser.opens(self._prompts[0])
            self._splitters = [parser.splitter(opening) for _ in self._texts]
        self._started = [False] * queued.sample_count
        self._left = queued.sample_count
        self._new_tokens = 0
        logprobs = getattr(body, "logprobs", None)
        self._logprobs = bool(logprobs) if self._chat else logprobs is not None
        self._header = {
            "id": ("chatcmpl-" if self._chat else "cmpl-") + secrets.token_hex(12),
            "created": int(time.time()),
            "model": served.name,
        }

    @property
    def done(self) -> bool:
        return self._left == 0

    @property
    def is_streamed(self) -> bool:
        return bool(self._body.stream)

    @property
    def samples(self) -> int:
        return len(self._texts)

    def add_event(self, event: TokenEvent) -> SampleDelta:
        """Adds new tokens of a sample and returns what they add to its text."""
        text = self._texts[event.index]
        offset = text.length
        self._new_tokens += len(event.tokens)
        self._left -= event.finish is not None
        shown, reasoning = text.add(event.tokens, last=event.finish is not None), ""
        if self._splitters:
            reasoning, shown = self._splitters[event.index].add(shown, last=event.finish is not None)
        offsets = [offset] * len(event.tokens)
        return SampleDelta(event.index, shown, event.tokens, event.logprobs, offsets, event.finish, reasoning)

    def build_response(self, samples: Sequence[SampleDelta]) -> dict[str, Any]:
        """The response that is not streamed."""
        kind = "chat.completion" if self._chat else "text_completion"
        choices = [self._choice(delta) for delta in samples]
        return {**self._header, "object": kind, "choices": choices, "usage": self._usage(), **self._prompt_ids()}

    def build_chunk(self, delta: SampleDelta) -> dict[str, Any] | None:
        """A chunk of a streamed response; None if there is nothing to show yet."""
        if not (delta.text or delta.reasoning or delta.finish or self._logprobs or self._body.return_token_ids):
            return None
        first = self._chat and not any(self._started)
        found = {
            **self._chunk([self._choice(delta, first=not self._started[delta.index])]),
            **(self._prompt_ids() if first else {}),
        }
        self._started[delta.index] = True
        return found | ({"usage": None} if self.includes_usage else {})

    def build_usage_chunk(self) -> dict[str, Any]:
        """The chunk with the usage, at the end of a stream."""
        return {**self._chunk([]), "usage": self._usage()}

    @property
    def includes_usage(self) -> bool:
        """Whether a stream includes the usage."""
        return self._body.stream_options is not None and bool(self._body.stream_options.include_usage)

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            **self._header,
            "object": "chat.completion.chunk" if self._chat else "text_completion",
            "choices": choices,
        }

    def _usage(self) -> dict[str, int]:
        return count_usage(sum(map(len, self._prompts)), self._new_tokens)

    def _prompt_ids(self) -> dict[str, Any]:
        """The prompt token ids of a chat. vLLM puts these beside the choices, and those of a completion into each."""
        return {"prompt_token_ids": self._prompts[0]} if self._chat and self._body.return_token_ids else {}

    def _choice(self, delta: SampleDelta, first: bool | None = None) -> dict[str, Any]:
        """A choice of a whole response if `first` is None, else of a chunk: the first of that choice or a later one."""
        found: dict[str, Any] = {
            "index": delta.index,
            "logprobs": self._format_logprobs(delta),
            "finish_reason": delta.finish,
        }
        if not self._chat:
            found["text"] = delta.text
        elif first is None:
            found["message"] = {"role": "assistant", "content": delta.text} | self._reasoning(delta)
        else:
            content = {"content": delta.text} if delta.text or not delta.reasoning else {}
            found["delta"] = ({"role": "assistant"} if first else {}) | content | self._reasoning(delta)
        if self._body.return_token_ids:
            found["token_ids"] = delta.tokens
            if not self._chat and first is not False:
                found["prompt_token_ids"] = self._prompts[delta.index // self._n]
        return found

    def _reasoning(self, delta: SampleDelta) -> dict[str, str]:
        return {"reasoning_content": delta.reasoning} if delta.reasoning else {}

    def _format_logprobs(self, delta: SampleDelta) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        names = [self._token_name(token) for token in delta.tokens]
        if not self._chat:
            return {
                "tokens": names,
                "token_logprobs": delta.logprobs,
                "top_logprobs": None,
                "text_offset": delta.offsets,
            }
        pairs = zip(names, delta.logprobs, strict=True)
        return {
            "content": [
                {"token": name, "logprob": logprob, "bytes": _bytes(name), "top_logprobs": []}
                for name, logprob in pairs
            ]
        }

    def _token_name(self, token: int) -> str:
        if self._body.return_tokens_as_token_ids:
            return f"token_id:{token}"
        name: str = self._served.tokenizer.decode([token])
        return name


def count_usage(prompt: int, new: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


def _bytes(name: str) -> list[int] | None:
    """The bytes of a token; None for one that is a part of a character."""
    return None if "\N{REPLACEMENT CHARACTER}" in name else list(name.encode())
