"""The datasets of the package `reasoning-gym` as tasks."""

from __future__ import annotations

import difflib
import random
from collections.abc import Mapping
from typing import Any

from ebbtide.config.task import CurriculumConfig, GymTaskConfig
from ebbtide.errors import UserError
from ebbtide.tasks.task import Problem, Problems, Score, ask


class GymTask:
    """A reasoning-gym dataset: its questions are the problems, and its own verifier scores. With a curriculum, there is
    one dataset for each level."""

    def __init__(self, config: GymTaskConfig, *, size: int, held_out: int, seed: int) -> None:
        try:
            from reasoning_gym.factory import DATASETS
        except ImportError:
            raise UserError("`task.gym` needs the package reasoning-gym: pip install 'ebbtide[gym]'") from None
        if config.dataset not in DATASETS:
            near = difflib.get_close_matches(config.dataset, DATASETS, n=3)
            some = f"similar ones: {', '.join(near)}" if near else f"such as: {', '.join(sorted(DATASETS)[:8])}"
            raise UserError(
                f"`task.gym.dataset` is `{config.dataset}`, which is none of reasoning-gym's {len(DATASETS)} datasets;"
                f" {some}"
            )
        self._config, self.size, self.held_out, self._seed = config, size, held_out, seed
        if (curriculum := config.curriculum) is None:
            self._datasets: dict[int | None, Any] = {None: self._create(config.options, size + held_out, seed)}
        else:
            levels = list(range(curriculum.start, curriculum.top + 1))
            of_each = size + -(-held_out // len(levels))
            options = [self._options(curriculum, level) for level in levels]
            made = [self._create(one, of_each, f"{seed}/{level}") for one, level in zip(options, levels, strict=True)]
            self._datasets = dict(zip(levels, made, strict=True))

    def _create(self, options: Mapping[str, Any], size: int, seed: int | str) -> Any:
        from reasoning_gym import create_dataset

        # The dataset seeds item i with seed + i, so the run's seed is spread: neighbouring run seeds share no problems.
        spread = random.Random(seed).randrange(2**31)
        try:
            return create_dataset(self._config.dataset, **{"seed": spread, "size": size, **options})
        except (TypeError, ValueError, AssertionError) as error:
            raise UserError(
                f"`task.gym.options: {options}` are not valid for reasoning-gym's `{self._config.dataset}`: {error}"
            ) from None

    def _options(self, curriculum: CurriculumConfig, level: int) -> dict[str, Any]:
        """The options of the dataset at one level of reasoning-gym's own curriculum."""
        from reasoning_gym.coaching.base_curriculum import DefaultCurriculumContext, RangeAttributeMode
        from reasoning_gym.factory import create_curriculum, has_curriculum

        dataset, options = self._config.dataset, self._config.options
        if not has_curriculum(dataset):
            raise UserError(f"reasoning-gym has no curriculum for `{dataset}`: set `task.gym.curriculum=null`")
        found = create_curriculum(dataset)
        highest = max((len(one.levels) for one in found.attributes.values()), default=0) - 1
        if curriculum.top > highest:
            raise UserError(
                f"`task.gym.curriculum.top: {curriculum.top}` is above {highest}, the highest level of `{dataset}` in"
                " reasoning-gym: lower it"
            )
        names = ("field_name", "lower_field_name", "upper_field_name")  # A range has two, another attribute one.
        fields = {getattr(one, name) for one in found.attributes.values() for name in names if hasattr(one, name)}
        if both := sorted(fields & options.keys()):
            raise UserError(
                f"`task.gym.options` has `{both[0]}`, which the levels of `task.gym.curriculum` set: remove it"
            )
        found.set_global_level(level)
        made = found.generate_configuration(context=DefaultCurriculumContext(RangeAttributeMode(curriculum.mode)))
        return {**options, **{name: getattr(made, name) for name in fields}}

    def problems(self) -> Problems:
        of_each = {level: self._level_problems(level) for level in self._datasets}
        apart = -(-self.held_out // len(of_each))
        turns = [problem for some in zip(*(one[:apart] for one in of_each.values()), strict=True) for problem in some]
        held_out = turns[: self.held_out]
        questions = {problem.metadata["question"] for problem in held_out}  # Small datasets repeat questions.
        return Problems(
            train=[
                problem
                for some in of_each.values()
                for problem in some[apart:]
                if problem.metadata["question"] not in questions
            ],
            held_out=held_out,
        )

    def _level_problems(self, level: int | None) -> list[Problem]:
        return [
            Problem(
                ask(item["question"]),
                item["answer"],
                {"question": item["question"], "entry": dict(item["metadata"])},
                level=level,
            )
            for item in self._datasets[level]
        ]

    def score(self, problem: Problem, completion: str) -> Score:
        entry = {
            "question": problem.metadata["question"],
            "answer": problem.answer,
            "metadata": problem.metadata["entry"],
        }
        value = float(self._datasets[problem.level].score_answer(answer=completion.strip(), entry=entry))
        return Score(value, {"verifier": value})
