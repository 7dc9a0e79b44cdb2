"""From a checked body to a job for the engine: prompts as tokens, how to sample, seeds."""

from __future__ import annotations

import copy
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase as Tokenizer

from ebbtide.errors import UserError
from ebbtide.policy.model import Loaded
from ebbtide.rollout.encoder import Encoder
from ebbtide.rollout.engine import Request, Sampling
from ebbtide.rollout.serve.body import Body, ChatBody, CompletionBody
from ebbtide.rollout.serve.desk import Job
from ebbtide.rollout.serve.error import ApiError
from ebbtide.tasks.task import Message

Asked = str | list[int] | tuple[Message, ...]
"""A prompt as it was asked for: a text, token ids, or a chat."""

GREEDY = 1e-4  # temperatures below it: logits divided by less would be too large for float32
TOO_LONG = "context_length_exceeded"
USUAL = 16  # tokens of a completion whose request does not say; of a chat: all there is room for


@dataclass(frozen=True)
class Limits:
    prompt: int
    new: int
    together: int
    """All in tokens."""
    samples: int
    """Of one request, and of all that wait or run."""


@dataclass(frozen=True)
class Served:
    """A model as clients see it."""

    name: str
    tokenizer: Tokenizer
    """The server's own: the engine's thread uses another."""
    vocabulary: int
    """Token ids are below this."""
    encoder: Encoder
    limits: Limits
    longest: int
    """Characters of the longest token."""


def serve_as(name: str, loaded: Loaded, limits: Limits, templated: bool) -> Served:
    """`templated`: by its chat template, if it has one."""
    tokenizer = copy.deepcopy(loaded.tokenizer)
    tokenizer("")  # takes off the truncation and padding that its file may set; later, while another thread decodes, that would fail
    longest = max(map(len, tokenizer.get_vocab()))  # tokens of bytes have a character for each byte
    return Served(name, tokenizer, loaded.rows, Encoder(tokenizer, templated=templated), limits, longest)


def asked_of(body: CompletionBody | ChatBody, served: Served) -> list[Asked]:
    """The prompts of a request, if they are neither more nor longer than can be: that is known before any of them is read."""
    found = [_chat(body)] if isinstance(body, ChatBody) else _prompts(body)
    if (samples := (body.n or 1) * len(found)) > served.limits.samples:
        raise ApiError(400, f"the request is for {samples} samples, more than the limit of {served.limits.samples}", "n")
    for one in found:
        _check_size(one, served)
    return found


def encoded(asked: Asked, served: Served) -> list[int]:
    """One prompt as tokens."""
    if isinstance(asked, list):
        tokens = asked
    else:
        try:
            tokens = (served.encoder.text(asked) if isinstance(asked, str) else served.encoder.chat(asked)).tokens
        except TemplateError as error:
            raise ApiError(400, f"the model's chat template refuses the messages: {error}", "messages") from None
        except UserError as error:
            raise ApiError(400, str(error), _param(asked)) from None
    _check(tokens, served, _param(asked))
    return tokens


def job_of(body: CompletionBody | ChatBody, prompts: list[list[int]], served: Served, cut: Callable[[], None]) -> Job:
    sampling = _sampling(body, _new_tokens(body, max(map(len, prompts)), served))
    return Job([Request(prompt, _seeds(body.seed, body.n or 1)) for prompt in prompts], sampling, cut)


def _seeds(first: int | None, samples: int) -> list[int]:
    """The samples of a prompt count up from the seed that was asked for."""
    if first is None:
        return [secrets.randbits(63) for _ in range(samples)]
    return [(first + i) % 2**64 for i in range(samples)]


def _chat(body: ChatBody) -> Asked:
    return tuple({"role": one.role, "content": one.text} for one in body.messages)


def _prompts(body: CompletionBody) -> list[Asked]:
    asked: list[Any] = body.prompt if isinstance(body.prompt, list) else [body.prompt]
    if asked and isinstance(asked[0], int):
        asked = [asked]
    if not asked:
        raise ApiError(400, "`prompt` is an empty list", "prompt")
    return asked


def _check_size(asked: Asked, served: Served) -> None:
    """Before it is read: a token has so many characters at most, and a message has a token at least."""
    limit = served.limits.prompt
    if isinstance(asked, list):
        return _check(asked, served, _param(asked))
    if isinstance(asked, tuple) and len(asked) > limit:
        raise ApiError(400, f"there are {len(asked)} messages, more than the limit of {limit} tokens", "messages", TOO_LONG)
    size = len(asked) if isinstance(asked, str) else sum(len(one["role"]) + len(one["content"]) for one in asked)
    if size > limit * served.longest:
        raise ApiError(400, f"the prompt has {size} characters, more than {limit} tokens, the limit, can have", _param(asked), TOO_LONG)


def _param(asked: Asked) -> str:
    return "messages" if isinstance(asked, tuple) else "prompt"


def _check(prompt: list[int], served: Served, param: str) -> None:
    if not prompt:
        raise ApiError(400, "the prompt is empty: the model needs at least one token to go on from", param)
    if len(prompt) > served.limits.prompt:
        raise ApiError(400, f"the prompt has {len(prompt)} tokens, more than the limit of {served.limits.prompt}", param, TOO_LONG)
    for token in (min(prompt), max(prompt)):
        if not 0 <= token < served.vocabulary:
            last = served.vocabulary - 1
            raise ApiError(400, f"the token id {token} does not exist: the model's are 0 to {last}", param)


def _new_tokens(body: CompletionBody | ChatBody, prompt: int, served: Served) -> int:
    """Of the longest completion."""
    room = min(served.limits.new, served.limits.together - prompt)
    if isinstance(body, ChatBody):
        name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    else:
        name, asked = "max_tokens", body.max_tokens
    if asked is None:
        return room if isinstance(body, ChatBody) else min(USUAL, room)
    if asked > room:
        raise ApiError(
            400,
            f"`{name}` is {asked}, and after a prompt of {prompt} tokens there is room for {room} (the limit of both together is {served.limits.together})",
            name,
            TOO_LONG,
        )
    return asked


def _sampling(body: Body, new: int) -> Sampling:
    temperature = 1.0 if body.temperature is None else body.temperature
    if temperature < GREEDY:
        return Sampling(new, 0.0, stop=body.stops, ignore_end=bool(body.ignore_eos))
    top_k = max(body.top_k or 0, 0)  # some clients say -1 for all
    return Sampling(
        new, temperature, 1.0 if body.top_p is None else body.top_p, top_k, body.min_p or 0.0, body.stops, bool(body.ignore_eos)
    )
