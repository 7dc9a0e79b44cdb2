"""The settings of `ebbtide serve`, and those of a worker that serves. Imports no torch."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from ebbtide.config.base import Count, Port, Section
from ebbtide.config.model import BaseKind, find_template_problem
from ebbtide.config.reasoning import ReasoningFormat, check_format
from ebbtide.config.root import Config

ADAPTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


class ServeConfig(Section):
    """Settings of `ebbtide serve MODEL_OR_RUN`, given as `KEY=VALUE`."""

    host: str = "127.0.0.1"
    """Address to listen on. If other machines can reach it, require an API key."""

    port: Port = 8000
    """Port to listen on; 0 is any free port."""

    name: Annotated[str, Field(min_length=1)] | None = None
    """Model name for clients; `null` is the hub id, or the name of the folder or file."""

    lora: dict[str, str] = {}
    """Adapters to serve beside the model, each under its own name, as in `lora.math=FOLDER lora.code=RUN`: a folder in
    PEFT's format, or a run with `model.lora` or a checkpoint of one. A client chooses by `model`."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` is the GPU if there is one."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the weights; `auto` is bfloat16 on a GPU and float32 on a CPU."""

    base: BaseKind | None = None
    """Quantize the linear layers of the model's blocks when it is loaded (`model.base`); a run with a quantized base
    has its own."""

    base_embeddings: bool = False
    """With `base`: quantize the embedding and the output head as well, to 8 bits (`model.base_embeddings`)."""

    chat_template_kwargs: dict[str, Any] = {}
    """Arguments for the chat template of every chat, such as `{enable_thinking: false}`, besides those of a run's
    `model.chat_template_kwargs`. A request's own `chat_template_kwargs` come before both."""

    reasoning_parser: ReasoningFormat | None = None
    """Answer chats with the reasoning apart, as `reasoning_content` beside `content`: `think` (between `<think>` and
    `</think>`), `harmony` (the channels of gpt-oss), a list of the two texts around it, or `auto`, what the chat
    template has of these. `null` leaves it in `content`."""

    batch: Count = 64
    """Maximum number of sequences that are decoded at the same time. The KV cache is sized for this many of
    `max_length`, or for as many tokens as fit into memory."""

    max_length: Annotated[int, Field(ge=2)] | None = None
    """Maximum tokens of a prompt and its completion together; `null` is the model's context."""

    max_queue: Count = 1024
    """Maximum number of samples waiting or running; further requests are refused with status 429."""

    max_body_kib: Count = 4096
    """Maximum size of a request's body; a larger one is refused with status 413."""

    stop_seconds: Annotated[float, Field(ge=0.0)] = 30.0
    """How long running requests may continue after the first Ctrl-C or SIGTERM; a second one ends them at once."""

    @field_validator("chat_template_kwargs")
    @classmethod
    def _arguments_are_free(cls, given: dict[str, Any]) -> dict[str, Any]:
        if problem := find_template_problem(given):
            raise ValueError(problem)
        return given

    @field_validator("reasoning_parser", mode="before")
    @classmethod
    def _format_is_known(cls, given: Any) -> Any:
        return check_format(given)

    @model_validator(mode="after")
    def _embeddings_come_with_a_base(self) -> Self:
        if self.base_embeddings and self.base is None:
            raise ValueError(
                "`base_embeddings` quantizes what `base` leaves: set `base=int4` or `float8`, or remove it"
            )
        return self

    @field_validator("lora", mode="before")
    @classmethod
    def _names_and_folders(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            raise ValueError(f"`lora` is {given!r}, and each adapter has a name: write `lora.NAME=FOLDER`")
        for name, folder in given.items():
            if not ADAPTER_NAME.fullmatch(name):
                raise ValueError(
                    f"`lora` names an adapter {name!r}, and a name has 1 to 64 letters, digits, `_` and `-`, the first"
                    " a letter or a digit: choose another"
                )
            if not isinstance(folder, str) or not folder:
                raise ValueError(
                    f"`lora.{name}` is {folder!r} and should be a folder: write `lora.NAME=FOLDER`, with no dot in the"
                    " name"
                )
        return given


class SamplerConfig(Config):
    """The settings of a worker that only samples, with requests from outside."""

    algorithm: Literal["serve"] = "serve"
    """What the worker does."""

    @property
    def cycle(self) -> tuple[str, ...]:
        return ("generate",)
