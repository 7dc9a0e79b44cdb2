"""The section `task.rewards`: several scorers of one task, such as judges and reward models, each with a weight."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from ebbtide.config.base import Count, Natural, Positive, Section
from ebbtide.config.model import resolve_dtype

ScorerName = Literal["exact", "numeric", "gsm8k", "regex", "math_verify"]
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class PythonTaskConfig(Section):
    """A task of your own, as a Python object; or, beside `task.file`, a reward function for its rows."""

    object: str
    """`module:name`, or `folder/file.py:name`, of a Task, or of a class or function that returns one. Beside
    `task.file`: of a reward function, as TRL has it, `f(completions, **columns)`, or verl, `f(data_source,
    solution_str, ground_truth, extra_info)`."""

    options: dict[str, Any] = {}
    """Keyword arguments for a class or function; of a reward function, in every call."""


class JudgeConfig(Section):
    """A language model that judges completions, asked at an OpenAI-compatible URL."""

    url: str
    """Its address, such as `http://localhost:8000/v1`; requests go to `/chat/completions` below it."""

    model: str
    """The name under which the server has the model."""

    prompt: str
    """What it is asked: a text in which `{prompt}`, `{completion}`, `{answer}` and the fields of a row, such as
    `{reward_model.ground_truth}`, are replaced. `{{name}}` stays as `{name}`."""

    system: str | None = None
    """System message before it."""

    options: dict[str, Any] = {"temperature": 0}
    """More fields of the request, such as `{temperature: 0, max_tokens: 512}`."""

    regex: str | None = None
    """Regular expression with one group: its last match in the judge's answer is the score. With neither this nor
    `json_field`, the whole answer is."""

    json_field: str | None = None
    """The score is this field of the last JSON object in the judge's answer that has it; `a.b` is the field `b` of the
    field `a`."""

    values: dict[str, float] | None = None
    """What verdicts are worth, such as `{correct: 1, incorrect: 0}`; upper and lower case are the same. `null`: the
    score is a number."""

    range: Annotated[list[float], Field(min_length=2, max_length=2)] | None = None
    """Lowest and highest number that the judge may give, such as `[1, 10]`: they become 0 and 1. Any other number is
    no answer. `null` takes numbers as they are."""

    concurrency: Count = 64
    """Most requests in flight, of all ranks together."""

    timeout_s: Positive = 60.0
    """Time limit for one request, in seconds."""

    retries: Natural = 3
    """How many times a request is repeated after a timeout, a lost connection, or a status such as 429 or 500."""

    step_timeout_s: Positive = 300.0
    """Time limit for all requests of a step, in seconds: samples that have no answer then are lost."""

    cache_size: Natural = 10_000
    """Most answers that are remembered during a run: the same request is asked once. 0 remembers none."""

    api_key_env: str | None = None
    """Name of the environment variable that has the API key. The key itself stands in no config."""

    @field_validator("url")
    @classmethod
    def _url_is_plain(cls, given: str) -> str:
        try:
            parts = urlsplit(given)
            port, host = parts.port, parts.hostname
        except ValueError:
            parts, port, host = urlsplit(""), None, None
        if parts.scheme not in ("http", "https") or not host or port == 0:
            raise ValueError("`url` is no address: write one such as `http://localhost:8000/v1`")
        if parts.username is not None or parts.query or parts.fragment:  # either may be a secret
            raise ValueError(
                "`url` has a user name, a query or a fragment: remove it, and name the environment variable with the"
                " API key in `api_key_env`"
            )
        return given

    @field_validator("api_key_env")
    @classmethod
    def _key_is_a_name(cls, given: str | None) -> str | None:
        if given is not None and not VARIABLE.fullmatch(given):
            raise ValueError(
                "`api_key_env` is not the name of an environment variable: put the key into a variable, and write its"
                " name here"
            )
        return given

    @field_validator("regex")
    @classmethod
    def _regex_has_a_group(cls, given: str | None) -> str | None:
        if given is None:
            return given
        try:
            groups = re.compile(given, re.DOTALL).groups
        except re.error as error:
            raise ValueError(f"`regex: {given}` is not a regular expression: {error}") from None
        if groups != 1:
            raise ValueError(f"`regex: {given}` has {groups} groups: write exactly one, around the score")
        return given

    @field_validator("options")
    @classmethod
    def _options_are_free(cls, given: dict[str, Any]) -> dict[str, Any]:
        if taken := sorted(given.keys() & {"model", "messages", "stream", "n"}):
            raise ValueError(f"`options.{taken[0]}` is set by Ebbtide itself: remove it")
        try:
            json.dumps(given, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"`options` cannot be written as JSON: {error}") from None
        return given

    @model_validator(mode="after")
    def _one_way_to_read(self) -> Self:
        if self.regex is not None and self.json_field is not None:
            raise ValueError("`regex` and `json_field` both say where the score is: remove one of the two")
        if self.values is not None and self.range is not None:
            raise ValueError("`values` are scores already, and `range` is for numbers: remove one of the two")
        if self.values is not None and not self.values:
            raise ValueError("`values` is empty: write verdicts and what they are worth, or remove it")
        if self.range is not None and not self.range[0] < self.range[1]:
            raise ValueError(f"`range: {self.range}` has to rise: write the lowest number first")
        return self


class RewardModelConfig(Section):
    """A frozen reward model or classifier, which scores on the run's own devices."""

    path: str
    """A local Hugging Face folder or a hub id of a model for sequence classification."""

    label: Natural | None = None
    """The output that is the score; `null` is the only one."""

    transform: Literal["none", "sigmoid", "softmax"] = "none"
    """What becomes of the outputs: nothing, the probability of each by itself, or probabilities that add up to 1."""

    max_tokens: Count | None = None
    """Longest prompt with its completion, in tokens of the reward model; a longer one is not scored, and counted.
    `null` is the model's context."""

    batch_tokens: Count = 16384
    """Most tokens of a forward, with padding."""

    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Type of its weights; `auto` is bfloat16 on a GPU and float32 on a CPU."""

    def itemsize(self, device_type: str) -> int:
        """Bytes of a weight on a device of this type."""
        return {"float32": 4, "bfloat16": 2}[resolve_dtype(self.dtype, device_type)]


class RewardConfig(Section):
    """One scorer: exactly one of `scorer`, `python`, `judge` and `reward_model`."""

    weight: float = 1.0
    """What its score is multiplied by; the reward is the sum of all. A negative one makes it a penalty."""

    scorer: Literal["task", ScorerName] | None = None
    """`task` is the score that the task gives by itself; the others compare with the answers of `task.file`, as
    `task.file.scorer` does."""

    python: PythonTaskConfig | None = None
    """A reward function for the rows of `task.file`, as TRL or verl has it."""

    judge: JudgeConfig | None = None
    """A language model at a URL."""

    reward_model: RewardModelConfig | None = None
    """A frozen reward model or classifier on the run's own devices."""

    @property
    def kinds(self) -> list[str]:
        """What is set of the four."""
        return [name for name in ("scorer", "python", "judge", "reward_model") if getattr(self, name) is not None]

    @property
    def is_local(self) -> bool:
        """Whether it scores in the scoring processes."""
        return self.scorer is not None or self.python is not None

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if len(self.kinds) != 1:
            found = " and ".join(f"`{name}`" for name in self.kinds) or "none"
            raise ValueError(
                f"set exactly one of `scorer`, `python`, `judge` and `reward_model` for each of `task.rewards`; set"
                f" now: {found}"
            )
        return self
