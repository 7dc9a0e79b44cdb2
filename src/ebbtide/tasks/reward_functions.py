"""Reward functions as people have them for TRL and for verl: they score the rows of `task.file` as they are.

Which of the two a function is, the names of its parameters tell: TRL calls one with `completions`, verl with
`solution_str`.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any, Literal

from ebbtide.config.task import FileTaskConfig
from ebbtide.errors import UserError
from ebbtide.tasks.files import FileTask
from ebbtide.tasks.task import Problem, Problems, Score

Kind = Literal["trl", "verl"]
NONE = "none"  # The part of a score that says that a function of TRL's kind gave no reward.
GROUND_TRUTH = "reward_model.ground_truth"  # Where rows of verl have it.


def reward_function_kind(found: object) -> Kind | None:
    """Whose reward function this is, by its parameters; None if it is none."""
    if isinstance(found, type) or not callable(found):
        return None
    try:
        names = inspect.signature(found).parameters
    except (TypeError, ValueError):  # of some functions that are written in C
        return None
    return "trl" if "completions" in names else "verl" if "solution_str" in names else None


class RewardFunctionTask:
    """The rows of a file, scored by a reward function, one completion at a time."""

    def __init__(
        self,
        config: FileTaskConfig,
        function: Callable[..., Any],
        options: Mapping[str, Any],
        *,
        held_out: int,
        key: str = "task.python",
    ) -> None:
        """`key`: where the function is named, for error messages."""
        self._config, self._function, self._options, self._key = config, function, dict(options), key
        self._source = FileTask(config, held_out=held_out, keeps_rows=True, checked=())
        self._kind = reward_function_kind(function)
        parameters = inspect.signature(function).parameters.values()
        self._accepts_all = any(one.kind == one.VAR_KEYWORD for one in parameters)
        named = [one for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
        self._accepted = {one.name for one in named}
        self._required = [one.name for one in named if one.default is one.empty]

    def problems(self) -> Problems:
        found = self._source.problems()
        self.check(found)
        return found

    def check(self, found: Problems) -> None:
        """Raises if the function asks for what rows do not have."""
        for problem in (*found.train[:1], *found.held_out[:1]):
            given = self._arguments(problem, "", {})
            if lacking := [name for name in self._required if name not in given]:
                raise UserError(
                    f"the reward function of `{self._key}.object` asks for `{lacking[0]}`, which is neither a field of"
                    f" the rows (they have: {', '.join(problem.metadata)}) nor among `{self._key}.options`: add it to"
                    " one of them, or give the parameter a default"
                )
            if self._kind == "verl" and given.get("ground_truth", "") is None:
                raise UserError(
                    f"rows have no `{GROUND_TRUTH}` to give to the reward function of `{self._key}.object`: name the"
                    " field in `task.file.answer_field`"
                )

    def score(self, problem: Problem, completion: str) -> Score:
        parts: dict[str, float] = {}
        given = self._arguments(problem, completion, parts)
        taken = {name: value for name, value in given.items() if self._accepts_all or name in self._accepted}
        result = self._function(**taken)
        if inspect.isawaitable(result):
            result = asyncio.run(_awaited(result))
        if self._kind == "verl":
            return _verl_score(result)
        (value,) = _one_of(result)
        return Score(0.0, {NONE: 1.0, **parts}) if value is None else Score(float(value), parts)

    def _arguments(self, problem: Problem, completion: str, parts: dict[str, float]) -> dict[str, Any]:
        """All that the function could be called with. What it logs as a metric becomes a part of the score."""
        row, field = problem.metadata, self._config.prompt_field
        if self._kind == "verl":
            truth = problem.answer
            if self._config.answer_field is None and GROUND_TRUTH in row:
                truth = row[GROUND_TRUTH]
            extra = {"num_turns": None, "rollout_reward_scores": {}, **(row.get("extra_info") or {})}
            return {
                "data_source": row.get("data_source"),
                "solution_str": completion,
                "ground_truth": truth,
                "extra_info": extra,
                **self._options,
            }
        plain = isinstance(row[field], str)
        columns = {name: [value] for name, value in row.items() if name not in (field, "completion", "completion_ids")}

        def log_metric(name: str, value: float) -> None:
            parts[name] = float(value)

        return {
            **columns,
            "log_metric": log_metric,
            "log_extra": lambda *_, **__: None,
            **self._options,
            "prompts": [row[field] if plain else problem.messages],
            "completions": [completion if plain else [{"role": "assistant", "content": completion}]],
        }


async def _awaited(result: Any) -> Any:
    return await result


def _one_of(result: Any) -> list[Any]:
    """The rewards that a function of TRL's kind returned for one completion."""
    try:
        rewards = list(result)
    except TypeError:
        raise TypeError(
            f"the reward function returned a {type(result).__name__}: it is given a list of completions and has to"
            " return a list of as many rewards"
        ) from None
    if len(rewards) != 1:
        raise ValueError(f"the reward function returned {len(rewards)} rewards for 1 completion")
    return rewards


def _verl_score(result: Any) -> Score:
    """The score of what a function of verl's kind returned: a number, or a dict with `score` and figures to report."""
    if not isinstance(result, dict):
        return Score(float(result))
    if "score" not in result:
        raise ValueError(f"the reward function returned a dict without `score`; it has: {', '.join(map(str, result))}")
    parts = {str(name): float(value) for name, value in result.items() if isinstance(value, Real) and name != "score"}
    return Score(float(result["score"]), parts)
