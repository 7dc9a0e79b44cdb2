"""Scores completions on all ranks of a run: first by judges and reward models, then in scoring processes, which add up
the parts of a reward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ebbtide.config.rewards import RewardModelConfig
from ebbtide.config.task import TaskConfig
from ebbtide.parallel.comm import Comm
from ebbtide.progress import Progress, no_progress
from ebbtide.tasks.judges import Answers, Judges
from ebbtide.tasks.score_message import ScoreResult
from ebbtide.tasks.scoring import ScoringPool
from ebbtide.tasks.task import Problem

Work = Sequence[tuple[Problem, str]]
"""Problems, each with what is scored of a completion."""


RewardModelVerb = Callable[[RewardModelConfig, Work, Progress], list[float | ScoreResult]]
"""Scores completions with a reward model on this rank's device; see `RewardModels.score`."""


class PartitionedScoring:
    """Each rank scores its share of the completions with its own worker processes, requests and reward models; the
    scores are then all-gathered."""

    def __init__(
        self,
        pool: ScoringPool,
        comm: Comm,
        config: TaskConfig | None = None,
        judges: Judges | None = None,
        reward_models: RewardModelVerb | None = None,
    ) -> None:
        """`judges` and `reward_models`: where the config has some."""
        self._pool, self._comm, self._judges, self._reward_models = pool, comm, judges, reward_models
        self._models = {} if config is None else config.rewards_with("reward_model")

    def score(self, work: Work, progress: Progress = no_progress) -> list[ScoreResult]:
        return self._comm.map_partitioned(work, [1] * len(work), lambda share: self._score_share(share, progress))

    def drain(self) -> dict[str, float]:
        """Metrics of this rank's requests to judges since the last call."""
        return self._judges.drain() if self._judges is not None else {}

    def _score_share(self, work: Work, progress: Progress) -> list[ScoreResult]:
        """What no judge or reward model could score is lost; the rest is scored by the processes."""
        judged, lost = list[tuple[Problem, str]](), dict[int, ScoreResult]()
        for place, ((problem, text), found) in enumerate(zip(work, self._judge(work, progress), strict=True)):
            if failures := [one for one in found.values() if isinstance(one, ScoreResult)]:
                lost[place] = failures[0]
            else:
                known = {name: one for name, one in found.items() if not isinstance(one, ScoreResult)}
                judged.append((replace(problem, judgements=known) if known else problem, text))
        scored = iter(self._pool.score(judged, progress))
        return [lost[place] if place in lost else next(scored) for place in range(len(work))]

    def _judge(self, work: Work, progress: Progress) -> list[dict[str, str | float | ScoreResult]]:
        """What judges and reward models say of each completion. The models compute while the judges are asked."""
        asked = self._judges.start(work) if self._judges is not None else None
        try:
            found = self._score_with_models(work, progress)
            answers: Answers = asked.result(progress) if asked is not None else [{} for _ in work]
        finally:
            if asked is not None:
                asked.future.cancel()
        return [{**one, **more} for one, more in zip(found, answers, strict=True)]

    def _score_with_models(self, work: Work, progress: Progress) -> list[dict[str, float | ScoreResult]]:
        found: list[dict[str, float | ScoreResult]] = [{} for _ in work]
        for (task, name), reward in self._models.items():
            places = [place for place, (problem, _) in enumerate(work) if problem.task == task]
            assert reward.reward_model is not None
            assert self._reward_models is not None
            some = self._reward_models(reward.reward_model, [work[place] for place in places], progress)
            for place, score in zip(places, some, strict=True):
                found[place][name] = score
        return found
