"""The section `model`: the policy to train."""

from __future__ import annotations

from datetime import date
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from ebbtide.config.base import Count, Section


class ScratchConfig(Section):
    """A new model with random weights."""

    architecture: Literal["llama", "qwen2", "qwen3", "mistral", "gemma", "qwen3_moe"] = "qwen3"
    """Model family, as transformers names it."""

    layers: Annotated[int, Field(ge=1, le=10_000)] = 2
    """Number of blocks."""

    hidden: Count = 128
    """Width of the residual stream."""

    heads: Count = 4
    """Query heads; each has `hidden / heads` channels unless `head_dim` is set."""

    kv_heads: Count = 4
    """Key and value heads (grouped-query attention when fewer than `heads`)."""

    head_dim: Count | None = None
    """Channels per head; `null` is `hidden / heads`."""

    mlp: Count = 384
    """Width of the MLP, or of each expert."""

    experts: Count | None = None
    """Number of experts; required for `qwen3_moe`, not allowed for the others."""

    experts_per_token: Count | None = None
    """Experts that each token is routed to; required for `qwen3_moe`, not allowed for the others."""

    context: Count = 256
    """Longest sequence that the model accepts, in tokens."""

    tied: bool = True
    """Whether input and output embeddings share one matrix."""

    alphabet: str | None = None
    """Tokenizer with one token per character of this text; `null` is one token per byte, which encodes any text."""

    vocabulary: Count | None = None
    """Rows of the embedding; `null` is the tokenizer's size. A larger value is for benchmarks with a real model's
    shape."""

    @model_validator(mode="after")
    def _heads_divide_hidden(self) -> ScratchConfig:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads = {self.heads} must be a multiple of kv_heads = {self.kv_heads}")
        if self.head_dim is None and self.hidden % self.heads:
            raise ValueError(f"hidden = {self.hidden} must be a multiple of heads = {self.heads}, or set head_dim")
        if (self.head_dim or self.hidden // self.heads) % 2:
            raise ValueError(
                f"a head has {self.head_dim or self.hidden // self.heads} channels, and rotary position embeddings need"
                " an even number: change `hidden`, `heads` or `head_dim`"
            )
        if self.architecture != "qwen3_moe":
            if (self.experts, self.experts_per_token) != (None, None):
                raise ValueError(
                    f"`architecture: {self.architecture}` has no `experts` and no `experts_per_token`: remove them"
                )
        elif self.experts is None or self.experts_per_token is None or self.experts_per_token > self.experts:
            raise ValueError("`architecture: qwen3_moe` needs `experts`, and `experts_per_token` of at most that many")
        return self


class LoraConfig(Section):
    """Low-rank adapters (LoRA): the model's own weights stay as they are, and only the adapters are trained."""

    rank: Count = 32
    """Rank of each adapter (r)."""

    alpha: Annotated[float, Field(gt=0)] = 32.0
    """What an adapter adds is multiplied by `alpha / rank`."""

    targets: list[str] | None = None
    """Names of the linear layers that get an adapter, as in `[q_proj, v_proj]`; `null` is all of the blocks."""

    exclude: list[str] = []
    """Names of linear layers that get none."""

    adapter: str | None = None
    """Start from this adapter: a folder in PEFT's format, which sets `rank`, `alpha` and `targets` as well, or a
    checkpoint of a run with `model.lora`; `null` starts with new ones, which add nothing at first. It is set by itself
    where `model.path` is the folder of such a run."""

    @model_validator(mode="after")
    def _targets_are_some(self) -> LoraConfig:
        if self.targets is not None and not set(self.targets) - set(self.exclude):
            raise ValueError("`targets` names no layer that `exclude` does not: leave both out for all linear layers")
        return self


def resolve_dtype(name: str, device_type: str) -> str:
    """The dtype that `model.dtype` names, on a device of this type."""
    if name == "auto":
        return "bfloat16" if device_type == "cuda" else "float32"
    return name


BaseKind = Literal["float8", "int4"]

TEMPLATE_ARGUMENTS = frozenset(
    {
        *("messages", "conversation", "tools", "chat_template", "add_generation_prompt", "continue_final_message"),
        *("tokenize", "sanitize_control_tokens", "padding", "truncation", "max_length", "return_tensors"),
        *("return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
    }
)
"""Arguments of a chat template, and of the function that renders it, that are set here."""


def find_template_problem(arguments: dict[str, Any]) -> str | None:
    """What is wrong with arguments for the chat template; None if nothing is."""
    if taken := sorted(TEMPLATE_ARGUMENTS & arguments.keys()):
        return f"`{taken[0]}` is set by Ebbtide itself: remove it"
    return None


class ModelConfig(Section):
    """The policy: exactly one of `path` and `scratch`."""

    path: str | None = None
    """A local Hugging Face folder, a hub id such as `Qwen/Qwen3-0.6B`, a `.gguf` file, `package:NAME/FILE` for a file
    inside an installed Python package, or the folder of another run, to start from its newest checkpoint. Of a
    multimodal model the language part is trained (docs/checkpoints.md).
    Python code in the model's files is never run (no `trust_remote_code`)."""

    weights: str | None = None
    """A checkpoint of a run whose weights replace those of `path` or `scratch`. It is set by itself where `path` is the
    folder of a run: then the model is that run's, as of its newest checkpoint."""

    scratch: ScratchConfig | None = None
    """If set, build a new model with random weights instead of loading one."""

    lora: LoraConfig | None = None
    """If set, freeze the model and train low-rank adapters beside its linear layers."""

    base: BaseKind | None = None
    """With `model.lora`: quantize the frozen linear layers of the blocks when the model is loaded, to 8 bits (`float8`:
    e4m3 with a scale for each row) or 4 (`int4`: with a factor and a code for 0 for each 32 numbers; layers that make
    keys and values have 8); `null` leaves them in `dtype`."""

    base_embeddings: bool = False
    """With `model.base`: quantize the embedding and the output head as well, to 8 bits (`float8`)."""

    tokenizer: str | None = None
    """Folder or hub id of another tokenizer; `null` is the model's own."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the weights; `auto` is bfloat16 on a GPU and float32 on a CPU."""

    chat_template: bool = True
    """Render problems with the tokenizer's chat template if it has one. Otherwise the messages' texts are joined as
    they are; control tokens (special tokens) come only from a template."""

    chat_template_kwargs: dict[str, Any] = {}
    """Arguments for the chat template, such as `{enable_thinking: false}`, wherever it is rendered. The template's text
    has their names; one that it does not use is warned of."""

    chat_date: Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\d$")] | None = None
    """Date for chat templates that print one, as Llama 3's does, such as `"2026-11-16"`; `null` is the day on which
    the run started, which is written to its config.yaml so that a resumed run has the same prompts."""

    @property
    def has_lasting_base(self) -> bool:
        """Whether only adapters are trained, of a model that can be loaded again at any time. A new one has other
        random weights on another device."""
        return self.lora is not None and self.scratch is None

    def itemsize(self, device_type: str) -> int:
        """Bytes of a weight on a device of this type."""
        return {"float32": 4, "bfloat16": 2}[resolve_dtype(self.dtype, device_type)]

    @model_validator(mode="after")
    def _chat_date_is_a_date(self) -> ModelConfig:
        try:
            date.fromisoformat(self.chat_date or "2000-01-01")
        except ValueError as error:
            raise ValueError(f"`model.chat_date` is {self.chat_date!r}, which is not a date: {error}") from None
        return self

    @field_validator("chat_template_kwargs")
    @classmethod
    def _arguments_are_free(cls, given: dict[str, Any]) -> dict[str, Any]:
        if problem := find_template_problem(given):
            raise ValueError(problem)
        return given

    @model_validator(mode="after")
    def _template_is_used(self) -> ModelConfig:
        if self.chat_template_kwargs and not self.chat_template:
            raise ValueError(
                "`chat_template_kwargs` are for the chat template, and `chat_template: false` switches it off: remove"
                " one of the two"
            )
        return self

    @model_validator(mode="after")
    def _exactly_one_source(self) -> ModelConfig:
        if (self.path is None) == (self.scratch is None):
            off = "both are set: switch one off with `model.path=null` or `model.scratch=null`"
            both = off if self.path is not None else "neither is set"
            raise ValueError(f"set exactly one of `model.path` and `model.scratch`, the model to train; {both}")
        if self.tokenizer is not None and self.scratch is not None and self.scratch.alphabet is not None:
            raise ValueError(
                "`model.tokenizer` and `model.scratch.alphabet` both set the tokenizer: remove one of the two"
            )
        return self
