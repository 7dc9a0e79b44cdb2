"""What clients may ask for, checked: the fields that count, and those that would and are not supported."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ebbtide.rollout.serve.error import ApiError

# Fields of OpenAI's and vLLM's that would change the answer: refused unless they ask for what is done anyway. Other unknown fields are ignored.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (None, True),
    "allowed_token_ids": (None,),
    "bad_words": (None, []),
    "best_of": (None, 1),
    "chat_template": (None,),
    "chat_template_kwargs": (None, {}),
    "continue_final_message": (None, False),
    "echo": (None, False),
    "frequency_penalty": (None, 0),
    "functions": (None, []),
    "include_stop_str_in_output": (None, False),
    "logit_bias": (None, {}),
    "min_tokens": (None, 0),
    "modalities": (None, ["text"]),
    "presence_penalty": (None, 0),
    "prompt_logprobs": (None,),
    "repetition_penalty": (None, 1),
    "response_format": (None, {"type": "text"}),
    "skip_special_tokens": (None, True),
    "stop_token_ids": (None, []),
    "structured_outputs": (None,),
    "suffix": (None, ""),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "truncate_prompt_tokens": (None,),
    "use_beam_search": (None, False),
}
# In place of pydantic's words, one for each kind that it tried.
WANTED = {
    "prompt": "a text, a list of texts, a list of token ids, or a list of such lists",
    "stop": "a text or a list of at most 16 texts, each of 1 to 256 characters",
    "messages": 'a list of {"role": ..., "content": ...}, the content a text or a list of {"type": "text", "text": ...}',
}

StopText = Annotated[str, Field(min_length=1, max_length=256)]
Token = Annotated[int, Field(ge=0)]
Limit = Annotated[int, Field(ge=1, le=10**15)]
T = TypeVar("T")
Many = Annotated[list[T], Field(fail_fast=True)]  # a list of a million wrong things is wrong at the first of them, and not for a minute


class Part(BaseModel):
    model_config = ConfigDict(strict=True)
    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    model_config = ConfigDict(strict=True)
    role: Annotated[str, Field(min_length=1)]
    content: str | Many[Part]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True)
    include_usage: bool | None = None


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
    model: str | None = None
    n: Limit | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=16)] | None = None
    temperature: Annotated[float, Field(ge=0.0, le=100.0)] | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    max_tokens: Limit | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    ignore_eos: bool | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        return () if self.stop is None else (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class CompletionBody(Body):
    prompt: str | Many[str] | Many[Token] | Many[Many[Token]]
    logprobs: Annotated[int, Field(ge=0)] | None = None


class ChatBody(Body):
    messages: Annotated[Many[ChatMessage], Field(min_length=1)]
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    max_completion_tokens: Limit | None = None


B = TypeVar("B", bound=Body)


def parsed(kind: type[B], text: bytes, model: str) -> B:
    """The body of a request to this model."""
    try:
        body = kind.model_validate_json(text)
    except ValidationError as error:
        raise _explained(error) from None
    if body.model not in (None, model):
        raise ApiError(404, f"the model {body.model!r} does not exist here: this server has {model!r}", "model", "model_not_found")
    for name, value in (body.model_extra or {}).items():
        if name in UNSUPPORTED and value not in UNSUPPORTED[name]:
            raise ApiError(400, f"`{name}` is not supported: leave it out", name, "unsupported_parameter")
    top = body.top_logprobs if isinstance(body, ChatBody) else body.logprobs if isinstance(body, CompletionBody) else None
    if top:
        name = "top_logprobs" if isinstance(body, ChatBody) else "logprobs"
        raise ApiError(400, f"`{name}` is {top}: only 0 is supported, the log-probs of the sampled tokens themselves", name)
    return body


def _explained(error: ValidationError) -> ApiError:
    problem = error.errors()[0]
    if problem["type"] == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {problem['ctx']['error']}")
    if not problem["loc"]:
        return ApiError(400, "the body must be a JSON object")
    name = str(problem["loc"][0])
    if problem["type"] == "missing" and len(problem["loc"]) == 1:
        return ApiError(400, f"`{name}` is missing", name)
    wanted = WANTED.get(name) or problem["msg"].removeprefix("Input should be ")
    return ApiError(400, f"`{name}` should be {wanted}", name)
