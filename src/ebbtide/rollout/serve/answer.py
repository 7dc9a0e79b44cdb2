"""What came of a job, in OpenAI's shapes: whole, or piece by piece."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ebbtide.rollout.serve.ask import Served
from ebbtide.rollout.serve.body import Body, ChatBody
from ebbtide.rollout.serve.desk import Job, Piece
from ebbtide.rollout.serve.text import Text


@dataclass
class Said:
    """A sample, or a piece of one."""

    index: int
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    """Where in the whole text each token begins."""
    finish: str | None = None

    def __iadd__(self, other: Said) -> Said:
        self.text += other.text
        self.tokens += other.tokens
        self.logprobs += other.logprobs
        self.offsets += other.offsets
        self.finish = other.finish
        return self


class Answer:
    """To one request."""

    def __init__(self, body: Body, job: Job, served: Served) -> None:
        self._body, self._served = body, served
        self._chat, self._n = isinstance(body, ChatBody), body.n or 1
        self._prompts = [request.prompt for request in job.requests]
        self._texts = [Text(served.tokenizer, body.stops) for _ in range(job.samples)]
        self._begun = [False] * job.samples
        self._left = job.samples
        self._new_tokens = 0
        logprobs = getattr(body, "logprobs", None)
        self._logprobs = bool(logprobs) if self._chat else logprobs is not None
        self._named = {
            "id": ("chatcmpl-" if self._chat else "cmpl-") + secrets.token_hex(12),
            "created": int(time.time()),
            "model": served.name,
        }

    @property
    def done(self) -> bool:
        return self._left == 0

    @property
    def samples(self) -> int:
        return len(self._texts)

    def take(self, piece: Piece) -> Said:
        text = self._texts[piece.index]
        offset = text.length
        self._new_tokens += len(piece.tokens)
        self._left -= piece.finish is not None
        shown = text.add(piece.tokens, last=piece.finish is not None)
        return Said(piece.index, shown, piece.tokens, piece.logprobs, [offset] * len(piece.tokens), piece.finish)

    def whole(self, samples: Sequence[Said]) -> dict[str, Any]:
        kind = "chat.completion" if self._chat else "text_completion"
        choices = [self._choice(said) for said in samples]
        return {**self._named, "object": kind, "choices": choices, "usage": self._usage(), **self._prompt_ids()}

    def chunk(self, said: Said) -> dict[str, Any] | None:
        """None where a piece has nothing to show yet."""
        if not (said.text or said.finish or self._logprobs or self._body.return_token_ids):
            return None
        first = self._chat and not any(self._begun)
        found = {**self._chunk([self._choice(said, first=not self._begun[said.index])]), **(self._prompt_ids() if first else {})}
        self._begun[said.index] = True
        return found | ({"usage": None} if self.tells_usage else {})

    def last_chunk(self) -> dict[str, Any]:
        return {**self._chunk([]), "usage": self._usage()}

    @property
    def tells_usage(self) -> bool:
        """In a stream."""
        return self._body.stream_options is not None and bool(self._body.stream_options.include_usage)

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._named, "object": "chat.completion.chunk" if self._chat else "text_completion", "choices": choices}

    def _usage(self) -> dict[str, int]:
        prompt = sum(map(len, self._prompts))
        return {"prompt_tokens": prompt, "completion_tokens": self._new_tokens, "total_tokens": prompt + self._new_tokens}

    def _prompt_ids(self) -> dict[str, Any]:
        """vLLM has them beside a chat's choices, and in each of a completion's."""
        return {"prompt_token_ids": self._prompts[0]} if self._chat and self._body.return_token_ids else {}

    def _choice(self, said: Said, first: bool | None = None) -> dict[str, Any]:
        """Of a whole answer where `first` is None; else of a chunk, the first of its choice or a later one."""
        found: dict[str, Any] = {"index": said.index, "logprobs": self._shown_logprobs(said), "finish_reason": said.finish}
        if not self._chat:
            found["text"] = said.text
        elif first is None:
            found["message"] = {"role": "assistant", "content": said.text}
        else:
            found["delta"] = ({"role": "assistant"} if first else {}) | {"content": said.text}
        if self._body.return_token_ids:
            found["token_ids"] = said.tokens
            if not self._chat and first is not False:
                found["prompt_token_ids"] = self._prompts[said.index // self._n]
        return found

    def _shown_logprobs(self, said: Said) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        names = [self._name(token) for token in said.tokens]
        if not self._chat:
            return {"tokens": names, "token_logprobs": said.logprobs, "top_logprobs": None, "text_offset": said.offsets}
        pairs = zip(names, said.logprobs, strict=True)
        return {"content": [{"token": name, "logprob": logprob, "bytes": _bytes(name), "top_logprobs": []} for name, logprob in pairs]}

    def _name(self, token: int) -> str:
        if self._body.return_tokens_as_token_ids:
            return f"token_id:{token}"
        name: str = self._served.tokenizer.decode([token])
        return name


def _bytes(name: str) -> list[int] | None:
    """None for a token that is a part of a character."""
    return None if "\N{REPLACEMENT CHARACTER}" in name else list(name.encode())
