"""A task whose reward is the weighted sum of several scorers (`task.rewards`). It runs in the scoring processes: what
judges answered and reward models computed comes with the problem."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ebbtide.config.rewards import RewardConfig
from ebbtide.tasks.judgement import read_score
from ebbtide.tasks.scorers import find_scorer
from ebbtide.tasks.task import Problem, Problems, Score, Task, to_score

EXTRACTED = "extracted"  # The part of a score that says whether `task.extract` matched.


class AnswerScorer:
    """Compares completions with the answers of a task by a scorer's name."""

    def __init__(self, source: Task, name: str) -> None:
        self._source, self._scorer = source, find_scorer(name)

    def problems(self) -> Problems:
        return self._source.problems()

    def score(self, problem: Problem, completion: str) -> Score:
        return Score(self._scorer(completion, problem.answer))


class RewardedTask:
    """The problems of a task, scored by several scorers."""

    def __init__(
        self,
        source: Task,
        rewards: Mapping[str, RewardConfig],
        scorers: Mapping[str, Task],
        checks: Sequence[Callable[[Problems], None]] = (),
    ) -> None:
        """`scorers`: those of the rewards that score here, by their names. `checks`: what raises if a scorer cannot
        score the problems."""
        self._source, self._rewards, self._scorers, self._checks = source, rewards, scorers, checks

    def problems(self) -> Problems:
        found = self._source.problems()
        for check in self._checks:
            check(found)
        return found

    def score(self, problem: Problem, completion: str) -> Score:
        total, parts = 0.0, dict[str, float]()
        for name, reward in self._rewards.items():
            if (scorer := self._scorers.get(name)) is not None:
                found = to_score(scorer.score(problem, completion))
            elif reward.judge is not None:
                found = Score(read_score(reward.judge, str(problem.judgements[name])))
            else:
                found = Score(float(problem.judgements[name]))
            total += reward.weight * found.value
            parts[name] = found.value
            parts |= {part if part == EXTRACTED else f"{name}/{part}": value for part, value in found.parts.items()}
        return Score(total, parts)
