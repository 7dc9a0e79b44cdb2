"""Request bodies and their validation. A field that is neither supported nor harmless is refused, as a response that
ignores it would be wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ebbtide.config.model import find_template_problem
from ebbtide.rollout.serve.error import ApiError
from ebbtide.tasks.task import Message

# Fields that change no response here. They are accepted with any value.
HARMLESS = {
    "cache_salt",
    "include_obfuscation",
    "metadata",
    "parallel_tool_calls",
    "priority",
    "prompt_cache_key",
    "prompt_cache_retention",
    "request_id",
    "safety_identifier",
    "service_tier",
    "spaces_between_special_tokens",
    "store",
    "user",
}
# More of them, where the response has token ids and no text.
HARMLESS_FOR_TOKENS = {
    "detokenize",
    "include_stop_str_in_output",
    "return_token_ids",
    "return_tokens_as_token_ids",
    "skip_special_tokens",
}
# Fields of OpenAI and vLLM that would change the response, with the values that ask for what is done anyway.
NO_EFFECT_VALUES: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "annotations": ([],),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template_kwargs": ({},),  # of a completion; ChatBody has the field
    "continue_final_message": (False,),
    "continuous_usage_stats": (False,),
    "detokenize": (True,),
    "documents": ([],),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "include_reasoning": (True,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logits_processors": ([],),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "stop_token_ids": ([],),  # of a completion or a chat; GenerateSampling has the field
    "stream": (False,),  # of GenerateBody; the others have the field
    "suffix": ("",),
    "tool_calls": ([],),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),  # of a completion; ChatBody has the field
    "typical_p": (1,),
    "use_beam_search": (False,),
}
# Descriptions that replace pydantic's, which has one for each type that it tried.
WANTED = {
    "prompt": "a text, a list of texts, a list of token ids, or a list of such lists",
    "token_ids": "a list of at least one token id",
    "stop_token_ids": "a list of at most 256 token ids",
    "stop": "a text or a list of at most 16 texts, each of 1 to 256 characters",
    "messages": (
        'a list of {"role": ..., "content": ...}, the content a text or a list of {"type": "text", "text": ...}'
    ),
}

StopText = Annotated[str, Field(min_length=1, max_length=256)]
Token = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Limit = Annotated[int, Field(ge=1, le=10**15)]
T = TypeVar("T")
# Validation stops at the first wrong item: a million of them would take a minute.
Many = Annotated[list[T], Field(fail_fast=True)]


class CheckedFields(BaseModel):
    """A part of a body whose unknown fields are checked."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
    harmless: ClassVar[set[str]] = HARMLESS

    def check_extra(self, where: str = "", param: str | None = None) -> None:
        """Raises if an unknown field would change the response. `param`: the field of the body that holds this part."""
        for name, value in (self.model_extra or {}).items():
            if value is not None and name not in self.harmless and value not in NO_EFFECT_VALUES.get(name, ()):
                what = f"`{where}{name[:64]}` is not supported: leave it out"
                raise ApiError(400, what, param or name[:64], "unsupported_parameter")


class TextPart(CheckedFields):
    type: Literal["text"]
    text: str


class ChatMessage(CheckedFields):
    role: Annotated[str, Field(min_length=1)]
    content: str | Many[TextPart]
    reasoning_content: str | None = None

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)

    @property
    def message(self) -> Message:
        """As the chat template has it."""
        found: Message = {"role": self.role, "content": self.text}
        if self.reasoning_content:
            found["reasoning_content"] = self.reasoning_content
        return found


class StreamOptions(CheckedFields):
    include_usage: bool | None = None


class SamplingFields(CheckedFields):
    """How to sample."""

    n: Limit | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=16)] | None = None
    temperature: Annotated[float, Field(ge=0.0, le=100.0)] | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    max_tokens: Limit | None = None
    ignore_eos: bool | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        return () if self.stop is None else (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """Tokens that end a completion besides the model's own."""
        return ()


class Body(SamplingFields):
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None

    @property
    def sampling(self) -> SamplingFields:
        return self

    def check(self) -> None:
        """Raises if the body asks for something unsupported."""
        self.check_extra()
        if self.stream_options is not None:
            self.stream_options.check_extra("stream_options.", "stream_options")


class CompletionBody(Body):
    prompt: str | Many[str] | Many[Token] | Many[Many[Token]]
    logprobs: Annotated[int, Field(ge=0)] | None = None

    def check(self) -> None:
        super().check()
        _check_top("logprobs", self.logprobs)


class ChatBody(Body):
    messages: Annotated[Many[ChatMessage], Field(min_length=1)]
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    max_completion_tokens: Limit | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def check(self) -> None:
        super().check()
        _check_top("top_logprobs", self.top_logprobs)
        if problem := find_template_problem(self.chat_template_kwargs or {}):
            raise ApiError(400, f"`chat_template_kwargs`: {problem}", "chat_template_kwargs")
        for place, message in enumerate(self.messages):
            message.check_extra(f"messages[{place}].", "messages")
            for part in () if isinstance(message.content, str) else message.content:
                part.check_extra(f"messages[{place}].content.", "messages")


class GenerateSampling(SamplingFields):
    harmless = HARMLESS | HARMLESS_FOR_TOKENS
    stop_token_ids: Annotated[list[Token], Field(max_length=256)] | None = None
    logprobs: Annotated[int, Field(ge=0)] | None = None

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        return tuple(self.stop_token_ids or ())


class GenerateBody(CheckedFields):
    """Token ids in, token ids out: the request of an environment that keeps an episode's tokens itself."""

    harmless = HARMLESS | HARMLESS_FOR_TOKENS
    model: str | None = None
    token_ids: Annotated[Many[Token], Field(min_length=1)]
    sampling_params: GenerateSampling | None = None

    @property
    def sampling(self) -> GenerateSampling:
        return self.sampling_params or GenerateSampling()

    def check(self) -> None:
        self.check_extra()
        self.sampling.check_extra("sampling_params.", "sampling_params")
        if (self.sampling.logprobs or 0) > 1:
            # vLLM's 1 is the sampled token and the likeliest one: clients ask for it to get the sampled one.
            raise ApiError(
                400,
                f"`sampling_params.logprobs` is {self.sampling.logprobs}: write 1, for the log-probs of the sampled"
                " tokens",
                "sampling_params",
            )


AnyBody = CompletionBody | ChatBody | GenerateBody
B = TypeVar("B", CompletionBody, ChatBody, GenerateBody)


def parse_body(kind: type[B], text: bytes, models: Sequence[str]) -> B:
    """Parses and validates the body of a request to one of these models."""
    try:
        body = kind.model_validate_json(text)
    except ValidationError as error:
        raise _explain(error) from None
    if body.model is not None:
        check_name(body.model, models)
    body.check()
    return body


def check_name(requested: str, models: Sequence[str]) -> None:
    """Raises if a request names a model that is not served."""
    if requested not in models:
        what = f"the model {requested!r} does not exist here: this server has {', '.join(map(repr, models))}"
        raise ApiError(404, what, "model", "model_not_found")


def _check_top(name: str, top: int | None) -> None:
    if top:
        raise ApiError(
            400, f"`{name}` is {top}: only 0 is supported, the log-probs of the sampled tokens themselves", name
        )


def _explain(error: ValidationError) -> ApiError:
    problem = error.errors()[0]
    if problem["type"] == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {problem['ctx']['error']}")
    if not problem["loc"]:
        return ApiError(400, "the body must be a JSON object")
    param = str(problem["loc"][0])
    if problem["type"] == "missing" and len(problem["loc"]) == 1:
        return ApiError(400, f"`{param}` is missing", param)
    is_nested = param == "sampling_params" and len(problem["loc"]) > 1
    name = str(problem["loc"][1]) if is_nested else param
    wanted = WANTED.get(name) or problem["msg"].removeprefix("Input should be ")
    return ApiError(400, f"`{'sampling_params.' if is_nested else ''}{name}` should be {wanted}", param)
