"""Turns a validated body into a request for the engine: prompts as tokens, sampling parameters, seeds."""

from __future__ import annotations

import copy
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase as Tokenizer

from ebbtide.config.reasoning import ReasoningFormat
from ebbtide.errors import UserError
from ebbtide.model.load import LoadedModel
from ebbtide.rollout.encoder import Encoder
from ebbtide.rollout.engine import Request, SamplingParams
from ebbtide.rollout.reasoning import ReasoningParser
from ebbtide.rollout.serve.error import ApiError
from ebbtide.rollout.serve.queue import QueuedRequest
from ebbtide.rollout.serve.schema import AnyBody, ChatBody, CompletionBody, GenerateBody, SamplingFields
from ebbtide.tasks.task import Message

PromptInput = str | list[int] | tuple[Message, ...]
"""A prompt as it is in the body: a text, token ids, or a chat."""

GREEDY = 1e-4  # below this temperature sampling is greedy: logits divided by less would overflow float32
TOO_LONG = "context_length_exceeded"
USUAL = 16  # default `max_tokens` of a completion, as at OpenAI; others get all the room there is


@dataclass(frozen=True)
class RequestLimits:
    """The limits of a request."""

    prompt: int
    new_tokens: int
    total: int
    """The most tokens of a prompt, of a completion, and of both together."""
    samples: int
    """The most samples of one request, and of all that wait or run."""


@dataclass(frozen=True)
class ServedModel:
    """A model as clients see it."""

    name: str
    tokenizer: Tokenizer
    """The tokenizer of the server's thread; the engine's thread has its own copy."""
    vocabulary: int
    """The number of token ids."""
    encoder: Encoder
    limits: RequestLimits
    longest_token: int
    """The number of characters of the longest token."""
    adapter: int = 0
    """The number of its adapter, if it is the model with one of several (`lora`)."""
    reasoning: ReasoningParser | None = None
    """If chats are answered with the reasoning apart, what tells it from the answer."""

    def for_body(self, body: AnyBody) -> ServedModel:
        """The model as this request wants it: with its own arguments of the chat template."""
        given = body.chat_template_kwargs if isinstance(body, ChatBody) else None
        return replace(self, encoder=self.encoder.with_arguments(given)) if given else self

    def with_adapter(self, name: str, number: int, templated: bool, arguments: Mapping[str, Any]) -> ServedModel:
        """The model with one of its adapters, under a name of its own."""
        encoder = Encoder(self.tokenizer, templated=templated, arguments=arguments)
        return replace(self, name=name, adapter=number, encoder=encoder)


def describe_served_model(
    name: str,
    loaded: LoadedModel,
    limits: RequestLimits,
    templated: bool,
    arguments: Mapping[str, Any] | None = None,
    reasoning: ReasoningFormat | None = None,
) -> ServedModel:
    """Describes a loaded model to clients. `templated`: chats use the chat template, if the model has one, with these
    `arguments`. `reasoning`: they are answered with the reasoning apart."""
    tokenizer = copy.deepcopy(loaded.tokenizer)
    # The first call removes the truncation and padding that the tokenizer's file may set. Doing that later, while
    # another thread decodes, would fail.
    tokenizer("")
    longest = max(map(len, tokenizer.get_vocab()))  # byte-level tokens have one character per byte
    encoder = Encoder(tokenizer, templated=templated, arguments=arguments)
    parser = None if reasoning is None else ReasoningParser(reasoning, tokenizer, "reasoning_parser")
    return ServedModel(name, tokenizer, loaded.vocabulary_rows, encoder, limits, longest, reasoning=parser)


def parse_prompts(body: AnyBody, served: ServedModel) -> list[PromptInput]:
    """The prompts of a body. Raises if there are too many or one is too long: that is known before any is encoded."""
    prompts = _prompts(body)
    if (samples := (body.sampling.n or 1) * len(prompts)) > served.limits.samples:
        raise ApiError(
            400, f"the request is for {samples} samples, more than the limit of {served.limits.samples}", "n"
        )
    for prompt in prompts:
        _check_size(prompt, served, "token_ids" if isinstance(body, GenerateBody) else _param(prompt))
    return prompts


def encode_prompt(given: PromptInput, served: ServedModel) -> list[int]:
    """Encodes one prompt."""
    if isinstance(given, list):
        tokens = given
    else:
        try:
            tokens = (served.encoder.text(given) if isinstance(given, str) else served.encoder.chat(given)).tokens
        except TemplateError as error:
            raise ApiError(400, f"the model's chat template refuses the messages: {error}", "messages") from None
        except UserError as error:
            raise ApiError(400, str(error), _param(given)) from None
    _check(tokens, served, _param(given))
    return tokens


def build_queued_request(
    body: AnyBody, prompts: list[list[int]], served: ServedModel, cut: Callable[[], None]
) -> QueuedRequest:
    """The request for the engine. `cut` closes the client's connection."""
    fields = body.sampling
    if fields.stop_tokens:
        _check_tokens(fields.stop_tokens, served, "sampling_params")
    sampling = _sampling(fields, _new_tokens(body, max(map(len, prompts)), served))
    requests = [Request(prompt, _seeds(fields.seed, fields.n or 1), served.adapter) for prompt in prompts]
    return QueuedRequest(requests, sampling, cut)


def _seeds(first: int | None, samples: int) -> list[int]:
    """The seeds of a prompt's samples: consecutive from the seed of the body, or random without one."""
    if first is None:
        return [secrets.randbits(63) for _ in range(samples)]
    return [(first + i) % 2**64 for i in range(samples)]


def _prompts(body: AnyBody) -> list[PromptInput]:
    if isinstance(body, GenerateBody):
        return [body.token_ids]
    if isinstance(body, ChatBody):
        return [tuple(one.message for one in body.messages)]
    given: list[Any] = body.prompt if isinstance(body.prompt, list) else [body.prompt]
    if given and isinstance(given[0], int):
        given = [given]
    if not given:
        raise ApiError(400, "`prompt` is an empty list", "prompt")
    return given


def _check_size(given: PromptInput, served: ServedModel, param: str) -> None:
    """Checks the length before encoding: a token has at most `longest` characters, and a message at least one token."""
    limit = served.limits.prompt
    if isinstance(given, list):
        return _check(given, served, param)
    if isinstance(given, tuple) and len(given) > limit:
        raise ApiError(
            400, f"there are {len(given)} messages, more than the limit of {limit} tokens", "messages", TOO_LONG
        )
    size = len(given) if isinstance(given, str) else sum(len(str(text)) for one in given for text in one.values())
    if size > limit * served.longest_token:
        raise ApiError(
            400,
            f"the prompt has {size} characters, more than fit into the limit of {limit} tokens",
            param,
            TOO_LONG,
        )


def _param(given: PromptInput) -> str:
    return "messages" if isinstance(given, tuple) else "prompt"


def _check(prompt: list[int], served: ServedModel, param: str) -> None:
    if not prompt:
        raise ApiError(400, "the prompt is empty: the model needs at least one token", param)
    if len(prompt) > served.limits.prompt:
        raise ApiError(
            400, f"the prompt has {len(prompt)} tokens, more than the limit of {served.limits.prompt}", param, TOO_LONG
        )
    _check_tokens(prompt, served, param)


def _check_tokens(tokens: Sequence[int], served: ServedModel, param: str) -> None:
    for token in (min(tokens), max(tokens)):
        if not 0 <= token < served.vocabulary:
            last = served.vocabulary - 1
            raise ApiError(400, f"the token id {token} does not exist: the model has 0 to {last}", param)


def _new_tokens(body: AnyBody, prompt: int, served: ServedModel) -> int:
    """The most new tokens of a completion."""
    room = min(served.limits.new_tokens, served.limits.total - prompt)
    if isinstance(body, ChatBody):
        name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        given = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    else:
        name, given = "max_tokens", body.sampling.max_tokens
    if given is None:
        return min(USUAL, room) if isinstance(body, CompletionBody) else room
    if given > room:
        raise ApiError(
            400,
            f"`{name}` is {given}, but after a prompt of {prompt} tokens there is room for {room} (the limit for both"
            f" together is {served.limits.total})",
            name,
            TOO_LONG,
        )
    return given


def _sampling(fields: SamplingFields, new: int) -> SamplingParams:
    temperature = 1.0 if fields.temperature is None else fields.temperature
    ends = SamplingParams(
        new, 0.0, stop=fields.stops, ignore_eos=bool(fields.ignore_eos), stop_token_ids=fields.stop_tokens
    )
    if temperature < GREEDY:
        return ends
    return replace(
        ends,
        temperature=temperature,
        top_p=1.0 if fields.top_p is None else fields.top_p,
        top_k=max(fields.top_k or 0, 0),  # some clients send -1 for no limit
        min_p=fields.min_p or 0.0,
    )
