"""The section `task`: the problems, and how completions are scored."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import field_validator, model_validator

from ebbtide.config.base import Count, Fraction, Natural, Positive, Section
from ebbtide.config.environment import EnvironmentConfig
from ebbtide.config.reasoning import ReasoningFormat, check_format
from ebbtide.config.rewards import PythonTaskConfig, RewardConfig, RewardModelConfig, ScorerName


class BuiltinTaskConfig(Section):
    """A task that ships with Ebbtide."""

    name: str
    """`copy`, `reverse` or `add`."""

    options: dict[str, Any] = {}
    """The task's own options, such as `{digits: 4}`."""


class CurriculumConfig(Section):
    """Problems become harder as rewards rise, by the levels that the dataset's curriculum in reasoning-gym has. Each
    level has `task.size` problems; held-out ones are of all levels in turn."""

    start: Natural = 0
    """The level to begin with, of all attributes of the dataset."""

    top: Count = 4
    """The highest level. An attribute that has fewer levels stays at its highest."""

    raise_at: Fraction = 0.8
    """The next level begins when the mean reward of the last `window` prompts is at least this."""

    lower_at: Fraction | None = None
    """The level before comes back, down to `start`, when that mean is below this; `null` never goes back."""

    window: Count = 64
    """Number of prompts of a level that the mean is over."""

    mode: Literal["inclusive", "upper_bound"] = "inclusive"
    """What a level is of an attribute that is a range: `inclusive`, all up to it; `upper_bound`, the last step only."""

    @model_validator(mode="after")
    def _levels_are_in_order(self) -> Self:
        if self.start >= self.top:
            raise ValueError(f"`start: {self.start}` must be below `top: {self.top}`")
        if self.lower_at is not None and self.lower_at >= self.raise_at:
            raise ValueError(f"`lower_at: {self.lower_at}` must be below `raise_at: {self.raise_at}`")
        return self


class GymTaskConfig(Section):
    """A dataset of the package `reasoning-gym`."""

    dataset: str
    """Name of the dataset, such as `leg_counting`."""

    options: dict[str, Any] = {}
    """Passed to the dataset as they are, such as `{min_animals: 2}`."""

    curriculum: CurriculumConfig | None = None
    """If set, problems become harder as rewards rise."""


class FileTaskConfig(Section):
    """Problems from a JSONL or Parquet file."""

    train: str
    """Path of a `.jsonl` or `.parquet` file, or `hf://datasets/OWNER/NAME/FILE` for a dataset's file on the hub."""

    held_out: str | None = None
    """Path of a file with the held-out problems; `null` sets the last `task.held_out` rows of `train` aside."""

    prompt_field: str = "prompt"
    """Field with the prompt: a text, or a list of messages with `role` and `content`. `a.b` is the field `b` of the
    field `a`."""

    answer_field: str | None = "answer"
    """Field with the expected answer, such as `answer`, or `reward_model.ground_truth` for the field `ground_truth` of
    the field `reward_model`; `null`: there are none, and completions are not scored, which distillation does not
    need."""

    scorer: ScorerName | None = None
    """How a completion is compared with the answer: `exact`, the same text; `numeric`, the same number; `gsm8k`, the
    same number after `####`, or at the end if the worked answer has no such mark; `regex`, the answer is a pattern
    that the completion must match; `math_verify`, mathematically equal (package `math-verify`). `null` is `exact`, or
    the reward function that `task.python` names."""


class ScoringConfig(Section):
    """Completions are scored (reward function) in worker processes; if scoring hangs or crashes, only that sample is
    lost and the run continues."""

    workers: Count = 2
    """Number of processes."""

    timeout_s: Positive = 10.0
    """Time limit for one completion, in seconds; beyond it the sample gets reward 0 and is counted."""


SOURCES = ("builtin", "gym", "file", "python")
NAME = re.compile(r"[\w-]+")  # of a task in a mix: it becomes part of the names of metrics


class TaskSourceConfig(Section):
    """Where problems come from, and what is asked and scored of them."""

    builtin: BuiltinTaskConfig | None = None
    """A task that ships with Ebbtide."""

    gym: GymTaskConfig | None = None
    """A dataset of `reasoning-gym`."""

    file: FileTaskConfig | None = None
    """Problems from a JSONL or Parquet file."""

    python: PythonTaskConfig | None = None
    """A task of your own; or, beside `file`, a reward function for its rows."""

    rewards: dict[str, RewardConfig] | None = None
    """Name -> a scorer with its weight: rule, reward function, judge or reward model; the reward is their weighted sum.
    A list is the same. `null`: the task scores by itself."""

    system: str | None = None
    """System message put before every problem."""

    reasoning_parser: ReasoningFormat | None = None
    """Score only what follows the reasoning of a completion, which is nothing if that does not end: `think` (between
    `<think>` and `</think>`), `harmony` (the channels of gpt-oss), a list of the two texts around it, or `auto`, what
    the chat template has of these. The prompt may open the reasoning. `null` scores the whole completion."""

    extract: str | None = None
    """Regular expression with one group: only its last match in a completion is scored, and no match scores 0.
    `null` scores the whole completion, as judges and reward models always do."""

    size: Count | None = None
    """Number of training problems: to generate (`builtin`, `gym`; `null` is 1000), or to use of the existing ones
    (`file`, `python`; `null` is all)."""

    held_out: Natural = 64
    """Number of problems set aside for `evaluate`. Ignored with `task.file.held_out` and for a `python` task, which
    provide their own, and beside `task.mix`, whose tasks each set some aside."""

    @model_validator(mode="after")
    def _one_scorer(self) -> Self:
        if self.is_scored_by_function and self.file is not None and self.file.scorer is not None:
            raise ValueError(
                f"`task.file.scorer: {self.file.scorer}` and the reward function in `task.python` both score"
                " completions: remove one of the two"
            )
        return self

    @model_validator(mode="after")
    def _rewards_are_possible(self) -> Self:
        if self.rewards is not None:
            check_rewards(self, self.rewards)
        return self

    @property
    def named_sources(self) -> list[str]:
        """The sources that are set: one of them, or `file` and `python`."""
        return [name for name in SOURCES if getattr(self, name) is not None]

    @property
    def is_scored_by_function(self) -> bool:
        """Whether `python` names a reward function for the rows of `file`."""
        return self.named_sources == ["file", "python"]

    @property
    def scores_itself(self) -> bool:
        """Whether the source of problems can score a text."""
        has_answers = self.file is None or self.file.answer_field is not None
        return bool(self.named_sources) and (has_answers or self.is_scored_by_function)

    @property
    def has_scorer(self) -> bool:
        """Whether a text can be scored."""
        return self.rewards is not None or self.scores_itself

    @property
    def has_own_held_out(self) -> bool:
        """Whether the held-out problems are the task's own, so that `held_out` sets none aside."""
        return self.python is not None if self.file is None else self.file.held_out is not None


def reward_key(task: str | None, name: str) -> str:
    """Where a reward is configured. `task`: its name in `task.mix`, if there is one."""
    return f"task.rewards.{name}" if task is None else f"task.mix.{task}.rewards.{name}"


def check_rewards(task: TaskSourceConfig, rewards: Mapping[str, RewardConfig]) -> None:
    """Refuses rewards that this task cannot have, and settings of it that none of them would read."""
    if not rewards:
        raise ValueError("`task.rewards` is empty: name a scorer, or remove it")
    scorers = {one.scorer for one in rewards.values()}
    for name, one in rewards.items():
        if not NAME.fullmatch(name) or name == "extracted":
            raise ValueError(
                f"`task.rewards` has a scorer named {name!r}: use letters, digits, `_` and `-`, and not `extracted`"
            )
        where = f"`task.rewards.{name}.{one.kinds[0]}"
        if one.scorer == "task" and not task.scores_itself:
            raise ValueError(f"{where}: task`, but the task has no answers to score by: remove it, or name their field")
        if one.scorer not in (None, "task") and (task.file is None or task.file.answer_field is None):
            raise ValueError(f"{where}: {one.scorer}` compares with answers of `task.file`, and there are none")
        if one.python is not None and task.file is None:
            raise ValueError(f"{where}` is a reward function for the rows of `task.file`, and there is none")
    own = {
        "task.file.scorer": task.file is not None and task.file.scorer is not None,
        "task.python": task.is_scored_by_function,
    }
    for key, is_set in own.items():
        if is_set and "task" not in scorers:
            raise ValueError(
                f"`{key}` is set, but none of `task.rewards` uses it: add `{{scorer: task}}` to them, or remove `{key}`"
            )
    if task.extract is not None and not any(one.is_local for one in rewards.values()):
        raise ValueError(
            "`task.extract` is for rules and reward functions, and all of `task.rewards` score whole completions:"
            " remove it"
        )


class MixedTaskConfig(TaskSourceConfig):
    """One of several tasks that are mixed: exactly one of `builtin`, `gym`, `file` and `python`, or `file` with a
    reward function in `python`."""

    weight: Positive = 1.0
    """Its share of the prompts, beside the weights of the others."""

    @model_validator(mode="after")
    def _exactly_one_source(self) -> Self:
        if len(self.named_sources) != 1 and not self.is_scored_by_function:
            found = " and ".join(f"`{name}`" for name in self.named_sources) or "none"
            raise ValueError(
                "set exactly one of `builtin`, `gym`, `file` and `python` for each task of `task.mix`; set now:"
                f" {found}"
            )
        return self


class TaskConfig(TaskSourceConfig):
    """The problems to train on: exactly one of `builtin`, `gym`, `file` and `python`, or an `environment` that has its
    own; or `file` with a reward function in `python`; or a `mix` of several."""

    mix: dict[str, MixedTaskConfig] | None = None
    """Name -> a task: prompts of several tasks are mixed, by their weights. A list in place of `task` is the same."""

    unmatched_steps: Count | None = 3
    """Stop the run after this many steps (and 256 completions) if no completion matched `extract`; `null` never
    stops it."""

    overlong_prompts: Literal["error", "drop"] = "error"
    """What to do with a prompt of more than `rollout.max_prompt_tokens`."""

    scoring: ScoringConfig = ScoringConfig()
    """Processes and time limit of scoring."""

    environment: EnvironmentConfig | None = None
    """If set, problems are played with an environment over several turns (docs/environments.md); those of all tasks of
    a `mix` with the same one. Without a source of problems, it has its own, one for each of `size` seeds."""

    @field_validator("reasoning_parser", mode="before")
    @classmethod
    def _format_is_known(cls, given: Any) -> Any:
        return check_format(given)

    @model_validator(mode="after")
    def _exactly_one_source(self) -> Self:
        named = self.named_sources
        if self.mix is not None or self.is_scored_by_function:
            return self
        if len(named) != 1 and not (self.environment is not None and not named):
            found = " and ".join(f"`task.{name}`" for name in named) or "none"
            off = (
                f": switch off the others, with {' or '.join(f'`task.{name}=null`' for name in named)}" if named else ""
            )
            raise ValueError(
                "set exactly one of `task.builtin`, `task.gym`, `task.file` and `task.python`, the problems to train"
                f" on, or a `task.environment` that has its own; set now: {found}{off}"
            )
        return self

    @model_validator(mode="after")
    def _a_mix_is_all(self) -> Self:
        if self.mix is None:
            return self
        if len(self.mix) < 2:
            raise ValueError("`task.mix` needs two tasks or more: write a single one as `task` itself")
        if odd := next((name for name in self.mix if not NAME.fullmatch(name)), None):
            raise ValueError(f"`task.mix` has a task named {odd!r}: use letters, digits, `_` and `-`")
        for key in (*SOURCES, "rewards", "system", "extract", "size"):
            if getattr(self, key) is not None:
                raise ValueError(
                    f"`task.{key}` is set beside `task.mix`, whose tasks have their own: move it to"
                    f" `task.mix.{next(iter(self.mix))}.{key}` and the others that need it"
                )
        if odd := next((name for name, one in self.mix.items() if one.reasoning_parser is not None), None):
            raise ValueError(
                f"`task.mix.{odd}.reasoning_parser` would be for one task, and completions of all are parsed alike: set"
                " `task.reasoning_parser`"
            )
        return self

    @property
    def has_scorer(self) -> bool:
        return super().has_scorer if self.mix is None else all(one.has_scorer for one in self.mix.values())

    @property
    def by_name(self) -> dict[str | None, TaskSourceConfig]:
        """The tasks by their names in `mix`; without one, the task itself, without a name."""
        return {None: self} if self.mix is None else dict[str | None, TaskSourceConfig](self.mix.items())

    def rewards_with(self, kind: Literal["judge", "reward_model"]) -> dict[tuple[str | None, str], RewardConfig]:
        """(name of the task, name of the reward) -> those that are of this kind."""
        return {
            (task, name): reward
            for task, one in self.by_name.items()
            for name, reward in (one.rewards or {}).items()
            if getattr(reward, kind) is not None
        }

    @property
    def reward_models(self) -> list[RewardModelConfig]:
        """The reward models, each once: several rewards may have the same."""
        found: list[RewardModelConfig] = []
        for reward in self.rewards_with("reward_model").values():
            if reward.reward_model is not None and reward.reward_model not in found:
                found.append(reward.reward_model)
        return found

    @property
    def is_scored(self) -> bool:
        """Whether completions can be scored, as far as the config tells."""
        return self.has_scorer or self.environment is not None

    @property
    def held_out_problems(self) -> int | None:
        """The problems that are set aside; None: a task has its own, and only it knows how many."""
        tasks = list(self.mix.values()) if self.mix is not None else [self]
        return None if any(one.has_own_held_out for one in tasks) else sum(one.held_out for one in tasks)
