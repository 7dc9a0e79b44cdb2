"""From a checked body to a job for the engine: prompts as tokens, how to sample, seeds."""

from __future__ import annotations

import copy
import secrets
from dataclasses import dataclass

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase as Tokenizer

from ebbtide.policy.model import Loaded
from ebbtide.rollout.encoder import Encoder
from ebbtide.rollout.engine import Request, Sampling
from ebbtide.rollout.serve.body import Body, ChatBody, CompletionBody
from ebbtide.rollout.serve.desk import Job
from ebbtide.rollout.serve.error import ApiError

GREEDY = 1e-4  # temperatures below it: logits divided by less would be too large for float32
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


def serve_as(name: str, loaded: Loaded, limits: Limits, templated: bool) -> Served:
    """`templated`: by its chat template, if it has one."""
    tokenizer = copy.deepcopy(loaded.tokenizer)
    tokenizer("")  # takes off the truncation and padding that its file may set; later, while another thread decodes, that would fail
    return Served(name, tokenizer, loaded.rows, Encoder(tokenizer, templated=templated), limits)


def job_of(body: CompletionBody | ChatBody, served: Served) -> Job:
    prompts = [_chat(body, served)] if isinstance(body, ChatBody) else _prompts(body, served)
    for prompt in prompts:
        _check(prompt, served, "messages" if isinstance(body, ChatBody) else "prompt")
    samples = body.n or 1
    if samples * len(prompts) > served.limits.samples:
        raise ApiError(400, f"the request is for {samples * len(prompts)} samples, more than the limit of {served.limits.samples}", "n")
    sampling = _sampling(body, _new_tokens(body, max(map(len, prompts)), served))
    return Job([Request(prompt, _seeds(body.seed, samples)) for prompt in prompts], sampling)


def _seeds(first: int | None, samples: int) -> list[int]:
    """The samples of a prompt count up from the seed that was asked for."""
    if first is None:
        return [secrets.randbits(63) for _ in range(samples)]
    return [(first + i) % 2**64 for i in range(samples)]


def _chat(body: ChatBody, served: Served) -> list[int]:
    try:
        return served.encoder.chat([{"role": one.role, "content": one.text} for one in body.messages]).tokens
    except TemplateError as error:
        raise ApiError(400, f"the model's chat template refuses the messages: {error}", "messages") from None


def _prompts(body: CompletionBody, served: Served) -> list[list[int]]:
    asked = body.prompt if isinstance(body.prompt, list) else [body.prompt]
    if asked and isinstance(asked[0], int):
        asked = [asked]
    if not asked:
        raise ApiError(400, "`prompt` is an empty list", "prompt")
    return [one if isinstance(one, list) else served.encoder.text(one).tokens for one in asked]


def _check(prompt: list[int], served: Served, param: str) -> None:
    if not prompt:
        raise ApiError(400, "the prompt is empty: the model needs at least one token to go on from", param)
    if max(prompt) >= served.vocabulary:
        raise ApiError(400, f"the token id {max(prompt)} does not exist: the model's are 0 to {served.vocabulary - 1}", param)
    if len(prompt) > served.limits.prompt:
        raise ApiError(
            400, f"the prompt has {len(prompt)} tokens, more than the limit of {served.limits.prompt}", param, "context_length_exceeded"
        )


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
            "context_length_exceeded",
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
