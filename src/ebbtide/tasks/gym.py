"""The datasets of the package `reasoning-gym` as tasks."""

from __future__ import annotations

import difflib
import random
from typing import Any

from ebbtide.errors import UserError
from ebbtide.tasks.task import Problem, Problems, Score, ask


class GymTask:
    """A reasoning-gym dataset: its questions are the problems, and its own verifier scores."""

    def __init__(self, dataset: str, options: dict[str, Any], *, size: int, held_out: int, seed: int) -> None:
        try:
            import reasoning_gym
            from reasoning_gym.factory import DATASETS
        except ImportError:
            raise UserError("`task.gym` needs the package reasoning-gym: pip install 'ebbtide[gym]'") from None
        if dataset not in DATASETS:
            near = difflib.get_close_matches(dataset, DATASETS, n=3)
            some = f"similar ones: {', '.join(near)}" if near else f"such as: {', '.join(sorted(DATASETS)[:8])}"
            raise UserError(
                f"`task.gym.dataset` is `{dataset}`, which is none of reasoning-gym's {len(DATASETS)} datasets; {some}"
            )
        self.size, self.held_out = size, held_out
        # The dataset seeds item i with seed + i, so the run's seed is spread: neighbouring run seeds share no problems.
        dataset_seed = random.Random(seed).randrange(2**31)
        try:
            self._dataset = reasoning_gym.create_dataset(
                dataset, **{"seed": dataset_seed, "size": size + held_out, **options}
            )
        except (TypeError, ValueError, AssertionError) as error:
            raise UserError(
                f"`task.gym.options: {options}` are not valid for reasoning-gym's `{dataset}`: {error}"
            ) from None

    def problems(self) -> Problems:
        problems = []
        for item in self._dataset:
            metadata = dict(item["metadata"])
            problems.append(
                Problem(ask(item["question"]), item["answer"], {"question": item["question"], "entry": metadata})
            )
        held_out = problems[: self.held_out]
        questions = {problem.metadata["question"] for problem in held_out}  # Small datasets repeat questions.
        return Problems(
            train=[problem for problem in problems[self.held_out :] if problem.metadata["question"] not in questions],
            held_out=held_out,
        )

    def score(self, problem: Problem, completion: str) -> Score:
        entry = {
            "question": problem.metadata["question"],
            "answer": problem.answer,
            "metadata": problem.metadata["entry"],
        }
        value = float(self._dataset.score_answer(answer=completion.strip(), entry=entry))
        return Score(value, {"verifier": value})
