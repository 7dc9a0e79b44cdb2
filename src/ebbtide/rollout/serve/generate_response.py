"""The response of `/inference/v1/generate`: token ids and log-probs, and no text."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from ebbtide.rollout.serve.queue import QueuedRequest, TokenEvent
from ebbtide.rollout.serve.response import SampleDelta, count_usage
from ebbtide.rollout.serve.schema import GenerateBody


class GenerateResponseBuilder:
    """Builds the response to one request."""

    def __init__(self, body: GenerateBody, queued: QueuedRequest) -> None:
        self.samples = queued.sample_count
        self._left = self.samples
        self._prompt = len(body.token_ids)
        self._has_logprobs = body.sampling.logprobs is not None

    @property
    def done(self) -> bool:
        return self._left == 0

    def add_event(self, event: TokenEvent) -> SampleDelta:
        """Adds new tokens of a sample."""
        self._left -= event.finish is not None
        return SampleDelta(event.index, "", event.tokens, event.logprobs, finish=event.finish)

    def build_response(self, samples: Sequence[SampleDelta]) -> dict[str, Any]:
        """The response, in the format of vLLM."""
        return {
            "request_id": f"generate-tokens-{secrets.token_hex(12)}",
            "choices": [self._choice(delta) for delta in samples],
            "usage": count_usage(self._prompt, sum(len(delta.tokens) for delta in samples)),
        }

    def _choice(self, delta: SampleDelta) -> dict[str, Any]:
        pairs = zip(delta.tokens, delta.logprobs, strict=True)
        content = [{"token": f"token_id:{token}", "logprob": logprob} for token, logprob in pairs]
        return {
            "index": delta.index,
            "token_ids": delta.tokens,
            "finish_reason": delta.finish,
            "logprobs": {"content": content} if self._has_logprobs else None,
        }
